"""The differences between the supported SGLang versions. All other files are written for the newest one.

What an older version has under another name, or not at all, is here under its newest name and with its newest meaning:

    0.5.18  reads its arguments through views; code that changes them declares it
    0.5.19  resolves its arguments once, when a launch asks for it; before, when they were created
    0.5.20  keeps them in a msgspec struct, lets plugins override steps of their resolution, and computes some of them on read
    0.5.21  passes every process its ranks when it publishes the arguments
    0.5.22  has a flag for the number of attention groups, loads plugins also in the detokenizer, and keeps a rank's settings in
            contexts, several of which may exist in a process
    0.5.23  loads the app of each HTTP process by a configurable name
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import sglang
from sglang.srt.arg_groups import overrides
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_device, get_parallel, get_server_args
from sglang.srt.server_args import ServerArgs

VERSION = tuple(int(number) for number in re.findall(r"\d+", sglang.__version__)[:3])

LaunchCheck = Callable[[Any, Callable[[Any], None]], None]
"""Called with SGLang's arguments and its own last resolution step."""


# --- The arguments ---

_unresolved = False
_launch_check: LaunchCheck | None = None


class _ResolvingOnce(ServerArgs):
    """``resolve_once`` for a version that resolves its arguments when they are created."""

    def __post_init__(self) -> None:
        if not _unresolved:
            self.resolve_once()

    def resolve_once(self) -> None:
        if not getattr(self, "_resolution_finished", False):
            self._as_given = types.SimpleNamespace(**vars(self))
            super().__post_init__()
            self._resolution_finished = True

    def _handle_other_validations(self) -> None:
        plain = super()._handle_other_validations
        if _launch_check is None:
            plain()
        else:
            _launch_check(self, lambda server_args: plain())


BaseArgs = ServerArgs if VERSION >= (0, 5, 19) else _ResolvingOnce
"""SGLang's arguments, as a base class."""


def derived(name: str, body: Callable[[dict[str, Any]], None], base: Any = BaseArgs, **metaclass: type) -> Any:
    """A subclass of SGLang's arguments with the fields and methods that ``body`` adds."""
    if VERSION >= (0, 5, 20):
        return types.new_class(name, (base,), {"dict": True, **metaclass}, body)
    return dataclasses.dataclass(types.new_class(name, (base,), metaclass, body))


def reducer(plain: Any) -> Callable[[Any], tuple[Any, ...]]:
    """What pickle takes from objects of SGLang's own class ``plain``: a function and its arguments, the class among them."""
    if VERSION >= (0, 5, 20):
        of_struct: Callable[[Any], tuple[Any, ...]] = plain.__reduce__
        return of_struct
    return lambda made: (_rebuilt, (type(made), dict(vars(made))))


def _rebuilt(kind: Any, attributes: dict[str, Any]) -> Any:
    """As pickle makes an object of a dataclass, which resolves none that was resolved."""
    (plain,) = (c for c in kind.__mro__ if c.__bases__ == (object,))
    made = object.__new__(plain if kind.__name__ == plain.__name__ else kind)
    vars(made).update(attributes)
    return made


@contextlib.contextmanager
def unresolved() -> Iterator[None]:
    """Arguments created in this block are not resolved before ``resolve_once``, in every version."""
    global _unresolved
    before, _unresolved = _unresolved, True
    try:
        yield
    finally:
        _unresolved = before


def held_back() -> bool:
    """Whether arguments that are created now must be ours, because SGLang's own would be resolved (``unresolved``)."""
    return _unresolved and VERSION < (0, 5, 19)


def resolve_if_made_so(server_args: Any) -> None:
    """Call this after ``unresolved``, on arguments that the caller expects in this version's usual form."""
    if VERSION < (0, 5, 19) and not _unresolved:
        server_args.resolve_once()


def add_launch_check(check: LaunchCheck, add: Callable[[str, Any, HookType], None]) -> None:
    """Wrap SGLang's last validation step in ``check``."""
    global _launch_check
    _launch_check = check
    if VERSION >= (0, 5, 20):
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        register_resolution_hook("handle_other_validations")(check)
    elif VERSION >= (0, 5, 19):
        step = "sglang.srt.arg_groups.serving_hook.handle_other_validations"
        add(step, lambda original, server_args: check(server_args, original), HookType.AROUND)


def declare_resolution(server_args: Any, source: str, **fields: Any) -> None:
    """Set arguments of a launch during its resolution."""
    if VERSION >= (0, 5, 19):
        overrides.declare_resolution(server_args, source, **fields)
    else:
        server_args._resolved_overrides.append((source, fields))


class _View:
    """SGLang's view of its arguments with the newest fields, as a rank will read them: unset arguments have their fallback.
    Before 0.5.22, ``dp_size`` also counted attention groups."""

    def __init__(self, view: Any, fallbacks: Mapping[str, Any]):
        self._view, self._fallbacks = view, fallbacks

    def __getattr__(self, name: str) -> Any:
        value = self._newest(name)
        return self._fallbacks.get(name) if value is None else value

    def _newest(self, name: str) -> Any:
        view = self._view
        if name == "attn_dp_size" and VERSION < (0, 5, 22):
            return view.dp_size if view.enable_dp_attention else 1
        if name == "dp_size" and VERSION < (0, 5, 22):
            return 1 if view.enable_dp_attention else view.dp_size
        if name in ("enable_paged_experts", "enable_nvidia_megakernel", "ple_offload_embedding") and VERSION < (0, 5, 23):
            return False
        if name == "gated_launch_port" and VERSION < (0, 5, 23):
            return None
        if name == "speculative_draft_kv_cache_dtype" and VERSION < (0, 5, 18):
            return None
        return getattr(view, name)


def resolving_view(server_args: Any) -> Any:
    """SGLang's arguments as far as they are resolved."""
    view = overrides.resolved_view if VERSION < (0, 5, 19) else overrides.resolving_view
    return _View(view(server_args), _fallbacks(type(server_args)))


def _fallbacks(kind: type) -> Mapping[str, Any]:
    from sglang.srt.arg_groups import arg_utils

    of = getattr(arg_utils, "fallbacks_of", None)
    return {} if of is None else of(kind)


def as_given(server_args: Any) -> Any:
    """SGLang's arguments before resolution, which changed them in place before 0.5.19."""
    return server_args._as_given if VERSION < (0, 5, 19) else server_args


def given(server_args: Any) -> dict[str, Any]:
    """The arguments that differ from SGLang's defaults, before resolution."""
    fields = msgspec.structs.fields(ServerArgs) if VERSION >= (0, 5, 20) else dataclasses.fields(ServerArgs)
    defaults = {f.name: f.default for f in fields}
    was = as_given(server_args)
    return {name: value for name, default in defaults.items() if (value := getattr(was, name, default)) != default}


def model_config_of(server_args: Any) -> Any:
    """SGLang's model config for the arguments."""
    return server_args.get_model_config() if VERSION < (0, 5, 19) else overrides.model_config_of(server_args)


def process_model_config() -> Any:
    """SGLang's model config of this process."""
    return model_config_of(get_server_args())


def has_contexts() -> bool:
    """Whether a process can see a launch as its ranks will (``server_pools``)."""
    return VERSION >= (0, 5, 22)


def post_capture_kv_sizing_planned(server_args: Any) -> bool:
    """Whether SGLang sizes the KV cache after it captures its graphs."""
    if VERSION < (0, 5, 19):
        return server_args.post_capture_kv_sizing_planned()
    return overrides.post_capture_kv_sizing_planned(server_args)


def mm_runtime_reservation_gb(cfg: Any) -> float:
    """GiB of VRAM that SGLang keeps for a multimodal model's inputs."""
    if VERSION < (0, 5, 18):
        return 0.0
    from sglang.srt.mem_cache import kv_cache_configurator

    return kv_cache_configurator.mm_runtime_reservation_gb(is_multimodal=True, mm_feature_transport=cfg.mm_feature_transport)


def has_chat_template(name: str) -> bool:
    """Whether ``name`` is one of SGLang's chat templates. Those in Python are newer."""
    from sglang.srt.parser.conversation import chat_template_exists

    if VERSION >= (0, 5, 23):
        from sglang.srt.parser.python_chat_template import get_python_chat_template

        return chat_template_exists(name) or get_python_chat_template(name) is not None
    return bool(chat_template_exists(name))


def problems(cfg: Any) -> list[str]:
    """What a launch with the resolved arguments ``cfg`` asks for that this version cannot combine with offloading."""
    if VERSION < (0, 5, 23) and cfg.tokenizer_worker_num > 1:
        return [
            f"--tokenizer-worker-num {cfg.tokenizer_worker_num}: the HTTP processes of SGLang {sglang.__version__} load no "
            "plugins; give 1, or install 0.5.23 or newer"
        ]
    return []


# --- The processes, and where they are ---


def loads_plugins() -> bool:
    """Whether SGLang should have loaded plugins in this process. Before 0.5.22 it loaded them only in its launcher and its
    schedulers; since then, in every process that reads the arguments."""
    return VERSION >= (0, 5, 22) or multiprocessing.parent_process() is None


class _Spawned:
    """Where the launcher placed this process. Before 0.5.21, only the scheduler receives it."""

    gpu_id = 0
    dp_rank: int | None = None

    def before_scheduler_init(self, scheduler: Any, server_args: Any, port_args: Any, *ranks: Any, **named: Any) -> None:
        order = ("gpu_id", "tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank", "dp_rank")
        given = named | dict(zip(order, ranks, strict=False))
        self.gpu_id, self.dp_rank = given["gpu_id"], given["dp_rank"]


_spawned = _Spawned()


def install(add: Callable[[str, Any, HookType], None]) -> None:
    """Install the scheduler hooks that only older versions need."""
    if VERSION < (0, 5, 21):
        add("sglang.srt.managers.scheduler.Scheduler.__init__", _spawned.before_scheduler_init, HookType.BEFORE)


def gpu_id() -> int:
    """The GPU of this process."""
    return _spawned.gpu_id if VERSION < (0, 5, 21) else get_device().gpu_id


def dp_rank() -> int:
    """The data-parallel replica or the attention group of this process."""
    return (_spawned.dp_rank if VERSION < (0, 5, 21) else get_parallel().dp_rank) or 0


def attn_dp_enabled() -> bool:
    """Whether the ranks of a replica split requests between attention groups."""
    parallel = get_parallel()
    return parallel.enable_dp_attention if VERSION < (0, 5, 22) else parallel.attn_dp_enabled


def uses_expert_location(layer: Any) -> bool:
    """Whether SGLang's map applies to the experts of a ``FusedMoE`` layer. Before 0.5.23 it applied to all."""
    return bool(layer.uses_expert_location) if VERSION >= (0, 5, 23) else True


def get_platform() -> Any:
    """What SGLang knows of the GPU: ``is_blackwell``, ``is_sm90``."""
    if VERSION < (0, 5, 19):
        from sglang.srt.utils import common

        return types.SimpleNamespace(is_blackwell=common.is_blackwell(), is_sm90=common.is_sm90_supported())
    from sglang.srt import runtime_context

    return runtime_context.get_platform()


# --- What is served ---


def decode_graph_sizes(runner: Any) -> list[int]:
    """The batch sizes for which ``runner`` has decode graphs."""
    if VERSION < (0, 5, 21):
        return getattr(runner.decode_cuda_graph_runner, "capture_bs", None) or []
    return runner.decode_cuda_graph_capture_bs


def deep_gemm_layout() -> str:
    """The layout that SGLang's DeepGEMM runner uses for decode steps: auto, masked or compact."""
    return "masked" if VERSION < (0, 5, 18) else envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.get().lower()


def swaps_expert_memory() -> bool:
    """Whether Nemotron-H may move each layer's NVFP4 experts into another layer's tensor between prefill and decode."""
    return VERSION >= (0, 5, 23) and envs.SGLANG_OPT_SM120_NVFP4_PHASE_LAYOUT.get()


def moe_runner_backend(layer: Any) -> Any:
    """SGLang's MoE runner of a built layer, None if its method calls a kernel itself."""
    if VERSION < (0, 5, 23):
        runners = (getattr(owner, "runner", None) for owner in (layer.quant_method, getattr(layer, "scheme", None)))
        return next((runner.runner_backend for runner in runners if runner is not None), None)
    return layer.quant_method.get_moe_runner_backend(layer)


def writers(newest: tuple[str, ...]) -> tuple[str, ...]:
    """The targets of ``weight_writes.WRITERS``, or ``online_updates.UPDATES``, that this version has. Before 0.5.21, one
    function received and loaded weights from a process group, and there were no sessions. Before 0.5.18, SGLang loaded no
    weights while capturing graphs."""
    later: tuple[str, ...] = (".begin_weight_update", ".end_weight_update") if VERSION < (0, 5, 21) else ()
    later += (".finalize_startup_weight_load",) if VERSION < (0, 5, 18) else ()
    found = tuple(target for target in newest if not target.endswith(later))
    if VERSION < (0, 5, 21):
        found = tuple(target.replace(".load_weights_from_", ".update_weights_from_") for target in found)
    return found
