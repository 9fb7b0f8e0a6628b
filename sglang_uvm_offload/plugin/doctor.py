"""What only SGLang can say: whether this version has every hook point, and whether it can serve a model with offloading."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_uvm_offload.config import OffloadConfig, parse
from sglang_uvm_offload.flags import PREFIX, FlagError
from sglang_uvm_offload.plugin import hooks, runtime, server_args
from sglang_uvm_offload.plugin.server_config import config_of


def hook_problems() -> list[str]:
    """Puts every hook in place in this process, as a scheduler does, and names those that cannot be."""
    server_args.install(hooks.add)
    hooks.watch()
    config = parse({"num_resident": "1"})
    assert config is not None
    runtime.install(config, hooks.add)
    HookRegistry.apply_hooks()
    reason = hooks.missing()
    return [f"sglang-uvm-offload {reason}"] if reason else []


def launched(model_path: str, device: str, num_resident: str, trust_remote_code: bool) -> OffloadConfig | None:
    """What SGLang's own resolution of this launch, with our checks in it, makes of the flags. Raises ``FlagError`` with every
    reason why it ends with an error."""
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
    except Exception as error:  # SGLang and transformers raise whatever a malformed config runs into
        reason = " ".join(str(error).split())
        raise FlagError([f"SGLang cannot serve {model_path}: {type(error).__name__}: {reason}"]) from error
    return config_of(args)
