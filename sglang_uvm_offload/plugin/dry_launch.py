"""The ``doctor`` checks that need SGLang: whether this version has every hook point, and whether a launch can offload."""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sglang.srt.server_args
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_uvm_offload.config import AUTO, RequestedConfig
from sglang_uvm_offload.flags import OFF, FlagError, flag_name
from sglang_uvm_offload.memory.host_pages import fragmentation
from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.plan.moe_shape import stated_experts
from sglang_uvm_offload.plugin import hook_points, hooks, roles, server_args
from sglang_uvm_offload.plugin.checks import sglang_gaps
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.launch import devices
from sglang_uvm_offload.plugin.launch.estimate import Estimate, estimate
from sglang_uvm_offload.plugin.launch.local_checkpoint import damage, unreadable
from sglang_uvm_offload.plugin.rank import built_runners, scheduler_hooks
from sglang_uvm_offload.plugin.server_config import config_of, requested_of
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.units import size

_PACKAGE = "sglang_uvm_offload"


def hook_problems() -> list[str]:
    """Load plugins as a launch does, install every scheduler hook, and list those that fail."""
    load_plugins()
    if not server_args.installed():  # SGLANG_PLUGINS excludes this plugin, which is reported separately
        server_args.install(hooks.add)
    roles.watch()
    requested = parse({"num_resident": "1", "stream_tokens": "inf"})
    assert requested is not None
    scheduler_hooks.install(requested, hooks.add)
    HookRegistry.apply_hooks()
    reason = hooks.missing()
    return hook_points.problems() + ([f"sglang-uvm-offload {reason}"] if reason else [])


class Launch:
    """A launch up to the point where it would spawn processes or load anything.

    It parses ``arguments`` like ``sglang.launch_server``, so unparsable ones end the process with status 2. Call
    ``hook_problems`` first.
    """

    def __init__(self, arguments: Sequence[str]):
        self.args = sglang.srt.server_args.prepare_server_args(list(arguments))
        self.args._from_command_line = False  # list a FlagError with the other problems instead of ending the process
        self.notes: list[str] = []
        """What the plugin logged while resolving the arguments, except warnings."""
        self.warned: list[str] = []

    @property
    def cfg(self) -> Any:
        """The arguments as resolved so far."""
        return resolving_view(self.args)

    def unreadable_models(self) -> list[str]:
        """Local models in the arguments that are missing, or whose folder contains a file that may block a reader forever. Call
        this before ``resolve``, which reads them."""
        named = {
            "--model-path": self.args.model_path,
            "--speculative-draft-model-path": self.args.speculative_draft_model_path,
            "--tokenizer-path": self.args.tokenizer_path,
        }
        return [f"{flag} {model}: {reason}" for flag, model in named.items() if model and (reason := unreadable(model))]

    def resolve(self) -> list[str]:
        """Resolve the arguments, run every launch check, and return the problems."""
        try:
            with _logged(self.notes, self.warned):
                self.args.resolve_once()
        except FlagError as error:
            return error.problems
        except Exception as error:  # SGLang may raise any type, and doctor prints it; a bug of ours is re-raised
            frames = traceback.extract_tb(error.__traceback__)
            if _is_ours(frames):
                raise
            text, at = " ".join(str(error).split()), frames[-1]
            return [f"SGLang refuses: {type(error).__name__}: {text or f'{at.filename}:{at.lineno}: {at.line}'}"]
        if requested_of(self.args) is None:
            return [f"{flag_name('num_resident')}: not set or {OFF}, so SGLang would serve this launch without offloading"]
        return []

    def gpus(self) -> list[int]:
        """The GPUs of the ranks on this machine; empty for another device, or if the arguments describe no ranks."""
        if self.cfg.device != "cuda" or sglang_gaps.bad_numbers(self.cfg):
            return []
        return devices.local_gpus(self.cfg)

    def damage(self) -> list[str]:
        """Damage in the weights that the launch reads, even if ``resolve`` failed before checking them."""
        return damage(self.cfg)

    def facts(self) -> list[str]:
        """The resolved launch, one fact per line. Call this only if ``resolve`` found no problem."""
        config = config_of(self.args)
        assert config is not None
        cfg, model = self.cfg, model_config_of(self.args)
        experts = stated_experts(model.hf_text_config)
        return [
            f"{flag_name('num_resident')} {_number(config)} of {experts} experts a layer, on {_ranks(cfg)}",
            f"memory: {config.backend}",
            f"--moe-runner-backend {cfg.moe_runner_backend}",
            *_drafts(config, cfg),
            f"host RAM available: {size(host_available())}",
            *self.estimate.facts,
            *self.notes,
        ]

    @functools.cached_property
    def estimate(self) -> Estimate:
        config = config_of(self.args)
        assert config is not None
        return estimate(config, self.args) if self.cfg.device == "cuda" else Estimate([], [])

    def warnings(self) -> list[str]:
        """What slows the launch down or may make it fail. Call this only if ``resolve`` found no problem."""
        config, model = config_of(self.args), model_config_of(self.args)
        assert config is not None
        routing = built_runners.doubts(config, self.cfg, model.quantization)
        return [*self.warned, *routing, *self.estimate.doubts, *sglang_gaps.warnings(self.cfg)]

    def short_pages(self) -> list[str]:
        """Why offloaded experts would land in small host pages. Call this only if ``resolve`` found no problem."""
        nbytes = self.estimate.offloaded_bytes
        warning = fragmentation(nbytes) if nbytes else None
        return [] if warning is None else [warning]


def _is_ours(frames: traceback.StackSummary) -> bool:
    """Whether an exception is a bug of this plugin. The innermost frame in SGLang or this package decides."""
    package = Path(__file__).parents[1]
    for frame in reversed(frames):
        if package in Path(frame.filename).parents:
            return True
        if "sglang" in Path(frame.filename).parts:
            return False
    return False


def _ranks(cfg: Any) -> str:
    sizes = ("tp_size", "ep_size", "pp_size", "dp_size", "attn_dp_size", "nnodes")
    given = [f"--{name.replace('_', '-')} {getattr(cfg, name)}" for name in sizes if getattr(cfg, name) != 1]
    return " ".join(given) or "one rank"


def _number(config: RequestedConfig) -> int | str:
    return AUTO if config.num_resident is None else config.num_resident


def _drafts(config: RequestedConfig, cfg: Any) -> list[str]:
    if cfg.speculative_algorithm is None:
        return []
    if cfg.speculative_algorithm == "NGRAM":
        return ["--speculative-algorithm NGRAM: no draft model is loaded"]
    model, number = cfg.speculative_draft_model_path or cfg.model_path, config.draft_num_resident
    where = "which stay in VRAM" if number is None else f"with {number} experts a layer in VRAM"
    return [f"--speculative-algorithm {cfg.speculative_algorithm} with the draft layers of {model}, {where}"]


@contextlib.contextmanager
def _logged(notes: list[str], warned: list[str]) -> Iterator[None]:
    """Collect the plugin's log in ``notes`` and ``warned``, independent of the launch's ``--log-level``."""

    def add(record: logging.LogRecord) -> None:
        lines = warned if record.levelno >= logging.WARNING else notes
        lines.append(record.getMessage())

    handler = logging.Handler()
    handler.emit = add  # type: ignore[method-assign]
    logger = logging.getLogger(_PACKAGE)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
