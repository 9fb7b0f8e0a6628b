"""What only SGLang can say: whether this version has every hook point, and whether it can serve a model with offloading."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_uvm_offload.config import PREFIX, FlagError, OffloadConfig
from sglang_uvm_offload.plugin import hooks, runtime, server_args


def hook_problems() -> list[str]:
    """Puts every hook in place in this process, as a scheduler does, and names those that cannot be."""
    server_args.install(hooks.add)
    hooks.add_publish()
    runtime.install(OffloadConfig(num_resident="1"), hooks.add)
    HookRegistry.apply_hooks()
    reason = hooks.missing()
    return [f"sglang-uvm-offload {reason}"] if reason else []


def launch_problems(model_path: str, device: str, num_resident: str, trust_remote_code: bool) -> list[str]:
    """Why SGLang's own resolution of this launch, with our checks in it, ends with an error; empty where it does not."""
    try:
        args = server_args.OffloadServerArgs(
            model_path=model_path,
            device=device,
            trust_remote_code=trust_remote_code,
            **{PREFIX + "num_resident": num_resident},
        )
        args.resolve_once()
    except FlagError as error:
        return error.problems
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        return [f"SGLang cannot serve {model_path}: {error}"]
    return []
