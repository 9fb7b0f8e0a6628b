"""Checks that need SGLang: whether this version has every hook point, and whether it can serve a model with offloading."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_uvm_offload.config import OffloadConfig, parse
from sglang_uvm_offload.flags import PREFIX, FlagError
from sglang_uvm_offload.plugin import hooks, runtime, server_args
from sglang_uvm_offload.plugin.server_config import config_of


def hook_problems() -> list[str]:
    """Install every hook in this process, as a scheduler does, and name those that fail."""
    server_args.install(hooks.add)
    hooks.watch()
    config = parse({"num_resident": "1"})
    assert config is not None
    runtime.install(config, hooks.add)
    HookRegistry.apply_hooks()
    reason = hooks.missing()
    return [f"sglang-uvm-offload {reason}"] if reason else []


def launched(model_path: str, device: str, num_resident: str, trust_remote_code: bool) -> OffloadConfig | None:
    """Resolve the arguments of this launch as SGLang does, with our checks, and return the config. Raises ``FlagError`` with
    every reason why they cannot be served."""
    try:
        args = server_args.OffloadServerArgs(
            model_path=model_path,
            device=device,
            trust_remote_code=trust_remote_code,
            **{PREFIX + "num_resident": num_resident},
        )
        args.resolve_once()
    except FlagError:
        raise
    except Exception as error:  # SGLang and transformers raise many types for a malformed config
        reason = " ".join(str(error).split())
        raise FlagError([f"SGLang cannot serve {model_path}: {type(error).__name__}: {reason}"]) from error
    return config_of(args)
