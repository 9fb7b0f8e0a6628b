"""Repeats, before SGLang spawns anything, the checks that would end its start after it has resolved its arguments.

SGLang 0.5.23, in order: where, what raises, and whether this file and ``start_rehearsal`` (``doctor`` only) repeat it.

    server_args.check_server_args        all of it                                       the launcher; doctor calls it too
    parser.template_detection            ``auto`` parsers without a tokenizer            doctor calls it too
    PortArgs.init_new                    a port of attention groups that is in use       no: it may be free when the launch asks
    distributed.bootstrap                no such GPU                                     ``devices``
                                         a port of --dist-init-addr in use, a peer away  no: as above
                                         free VRAM of ranks differs by over a tenth      here
    managers.tokenizer_manager           no tokenizer or processor, a broken one         doctor loads it
    parser.template_manager              templates that are not there, or malformed      ``named_files``
    eplb.expert_location                 a map that is not there, malformed, too small   ``expert_location_file``
    configs.model_config                 of the target                                   the arguments' own resolution
                                         of a draft model                                doctor makes it
    lora.lora_config                     an adapter that is not there                    ``named_files``
    model_loader.loader                  a quantisation that this GPU or dtype lacks     here
    model_loader.utils                   no class for the model                          here
    layers, models                       heads, experts, hidden units, blocks of scales
                                         that ranks do not divide                        here
                                         a kernel library that is not installed          no: only the import shows it
    model_loader.weight_utils            shards that are missing or cut short            ``cli.doctor``
    mem_cache                            no room for the KV cache                        ``vram_check``
                                         the storage backend's config                    ``named_files``
    speculative                          files of n-grams, of tokens                     ``named_files``
    entrypoints.http_server              --port in use, after all weights are loaded     doctor warns: it may be free by then
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.environ import envs
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.model_loader.utils import get_model_architecture

from sglang_uvm_offload.cuda.device import DriverError, device_arch
from sglang_uvm_offload.plugin.checks import expert_location_file, named_files
from sglang_uvm_offload.plugin.launch.ranks import free_by_gpu, ranks
from sglang_uvm_offload.plugin.launch.stated_quantization import stated_quantization
from sglang_uvm_offload.sizing.architectures import sglang_architectures
from sglang_uvm_offload.sizing.model_files import ModelFiles
from sglang_uvm_offload.sizing.moe_shape import stated_experts
from sglang_uvm_offload.units import size

BALANCE = 0.9
"""The share of any rank's free VRAM that the rank with the least must have
(``distributed.bootstrap._check_tp_memory_balance``)."""


def problems(cfg: Any, model: Any) -> list[str]:
    """Why SGLang would end before it loads weights. ``cfg``: its resolved arguments; ``model``: its config of the model."""
    out = [*_classless(cfg, model), *named_files.problems(cfg)]
    out += [*expert_location_file.problems(cfg, model), *_indivisible(cfg, model)]
    if cfg.device == "cuda":
        out += [*_quantization(cfg, model), *_unbalanced(cfg)]
    return out


def _classless(cfg: Any, model: Any) -> Iterator[str]:
    """A model for which SGLang has no class: its ranks look for one in the transformers library. This check skips models whose
    class would run code from the checkpoint that the user does not trust."""
    own_code = getattr(model.hf_config, "auto_map", None) and not cfg.trust_remote_code
    named = model.hf_config.architectures
    if own_code or not named or sglang_architectures().intersection(named):
        return
    try:
        get_model_architecture(model)
    except Exception as error:  # noqa: BLE001 -- of any type, from SGLang's code; it would end each rank
        yield f"SGLang cannot serve {cfg.model_path}: {type(error).__name__}: {error}"


def _unbalanced(cfg: Any) -> Iterator[str]:
    """Each rank compares its free VRAM with the least in its replica, after creating the same context on each GPU. This check
    does not see ranks on other machines."""
    if cfg.tp_size < 2 or cfg.gated_launch_port is not None or not envs.SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK.get():
        return
    here = ranks(cfg)
    try:
        free = free_by_gpu(here)
    except DriverError:  # ``devices`` reports it
        return
    for replica in sorted({rank.replica for rank in here}):
        gpus = sorted({rank.gpu for rank in here if rank.replica == replica})
        least, most = min(gpus, key=free.__getitem__), max(gpus, key=free.__getitem__)
        if free[least] < BALANCE * free[most]:
            yield (
                f"--tp-size {cfg.tp_size}: GPU {least} has {size(free[least])} of free VRAM and GPU {most} has "
                f"{size(free[most])}; SGLang refuses a difference of over a tenth: end what else runs on GPU {least}, or "
                "set SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0"
            )


def _indivisible(cfg: Any, model: Any) -> Iterator[str]:
    experts, redundant = stated_experts(model.hf_text_config), cfg.ep_num_redundant_experts
    if experts and (experts + redundant) % cfg.ep_size:
        held = f"{experts} experts" + (f" and --ep-num-redundant-experts {redundant}" if redundant else "")
        yield f"--ep-size {cfg.ep_size}: does not divide the model's {held}"
    if cfg.device == "cuda":  # on a CPU SGLang pads them
        yield from _heads(cfg, model)
        yield from _expert_units(cfg, model)


def _heads(cfg: Any, model: Any) -> Iterator[str]:
    over = cfg.tp_size // max(cfg.attn_dp_size * cfg.attn_cp_size, 1)
    heads = model.num_attention_heads
    if not isinstance(heads, int) or not heads or over < 2:
        return
    if heads % over:
        yield f"--tp-size {cfg.tp_size}: its {over} attention ranks do not divide the model's {heads} heads"
    elif model.attention_arch != AttentionArch.MLA:
        kv = model.get_total_num_kv_heads()
        if max(kv, over) % min(kv, over):
            yield f"--tp-size {cfg.tp_size}: its {over} attention ranks and the model's {kv} KV heads do not divide each other"


def _expert_units(cfg: Any, model: Any) -> Iterator[str]:
    units = getattr(model.hf_text_config, "moe_intermediate_size", None)
    over = cfg.tp_size // max(cfg.ep_size * cfg.moe_dp_size, 1)
    if not isinstance(units, int) or over < 1:
        return
    block = _block(model, cfg.quantization or model.quantization)
    if units % (over * block):
        blocks = f" into blocks of {block} that share a scale" if block > 1 else ""
        yield (
            f"--tp-size {cfg.tp_size} with --ep-size {cfg.ep_size}: {over} ranks do not divide an expert's {units} hidden "
            f"units{blocks}"
        )


def _block(model: Any, quantization: str | None) -> int:
    """Hidden units of an expert that share a scale, so that SGLang cannot split them (``Fp8MoEMethod.create_weights``)."""
    found = stated_quantization(model)
    block = found.get("weight_block_size") if quantization == "fp8" else None
    plain = any("expert" in str(name) for name in found.get("modules_to_not_convert") or found.get("ignored_layers") or ())
    return int(block[0]) if isinstance(block, (list, tuple)) and block and isinstance(block[0], int) and not plain else 1


def _missing_files(cfg: Any, model: Any, name: str) -> list[str]:
    """For a quantisation that the config does not state, the files of which SGLang needs one
    (``weight_utils.get_quant_config``). ``modelopt_fp4`` without a file quantises while loading."""
    folder = ModelFiles(cfg.model_path, cfg.revision, cfg.download_dir).on_disk
    if name == "modelopt_fp4" or stated_quantization(model) or folder is None:
        return []
    try:
        files = get_quantization_config(name).get_config_filenames()
    except ValueError:  # an unknown name, which SGLang refuses when it parses its arguments
        return []
    return [] if any(str(path).endswith(tuple(files)) for path in folder.glob("*.json")) else list(files)


def _quantization(cfg: Any, model: Any) -> Iterator[str]:
    """The checks of ``model_loader.loader``. What depends on the checkpoint is left to SGLang."""
    name, here = cfg.quantization or model.quantization, ranks(cfg)
    if name and (files := _missing_files(cfg, model, name)):
        yield f"--quantization {name}: SGLang needs {' or '.join(files)} in the model's folder, and it is missing"
    if not here:  # SGLang refuses more machines than ranks
        return
    try:
        kind = get_quantization_config(name) if name else None
        arch = int(device_arch(here[0].gpu).removeprefix("sm_"))
        least, dtypes = (kind.get_min_capability(), kind.get_supported_act_dtypes()) if kind else (0, [model.dtype])
    except (ValueError, TypeError, DriverError):
        return
    if arch < least:
        yield f"--quantization {name}: SGLang needs a GPU of sm_{least} or newer for it, but this one is sm_{arch}"
    if model.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        yield f"--dtype {str(model.dtype).removeprefix('torch.')}: SGLang computes {name} in {names} only"
