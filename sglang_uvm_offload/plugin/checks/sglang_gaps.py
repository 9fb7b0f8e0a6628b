"""Refuses launches that SGLang 0.5.23 accepts although they generate wrong tokens, or fail only after all weights are loaded.

The place in SGLang, the setting, and the failure:

    parallel sizes below 1                                   ignored, or an error that does not name the flag; plans divide by
                                                             them
    mem_cache.kv_cache_configurator                          --max-total-tokens, --context-length or --page-size below 1, an
                                                             invalid VRAM fraction: fails after loading
    eplb.expert_location_dispatch                            a negative number of redundant experts: fails at the first token
    eplb.expert_location (_compute_logical_to_all_physical_map, ExpertLocationDispatchInfo)
                                                             a map that misses an expert: wrong tokens on a GPU
                                                             too few layers: fails after loading
    models.gpt_oss (load_weights)                            any map: wrong tokens
    models without get_model_config_for_expert_location      any map: fails at the first token
    lora.lora_manager (init_lora_adapters)                   missing adapter: fails after loading
    speculative.ngram_worker (NGRAMWorker)                   missing corpus: fails after loading
    speculative.eagle_worker_v2 (init_token_map)             missing token map: fails after loading
    mem_cache.hybrid_cache (parse_storage_backend_extra_config)
                                                             missing file: fails after loading
    entrypoints.http_server (init_multi_tokenizer)           missing template with several tokenizer workers: fails after
                                                             loading
    entrypoints.http_server (_setup_and_run_http_server)     --port in use: fails after loading. Only a warning here, because
                                                             the port may be free by then

SGLang itself refuses the following in the launcher or before its ranks read weights: models without a class; load formats
without their package or files; drafts without a readable config; heads, experts and hidden units that the ranks do not divide;
GPUs with unequal free VRAM; quantisations without their file, GPU or dtype; bad tokenizers, parsers, templates and diffusion
configs; and expert maps that it cannot read.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sglang.srt.eplb.expert_location import ModelConfigForExpertLocation

from sglang_uvm_offload.plugin.launch.local_checkpoint import unreadable

_MAP = "physical_to_logical_map"
_LEAST = {
    **dict.fromkeys(("tp_size", "ep_size", "pp_size", "dp_size", "nnodes", "moe_dp_size", "attn_cp_size"), 1),
    **dict.fromkeys(("page_size", "context_length", "max_total_tokens"), 1),
    "ep_num_redundant_experts": 0,
}

IN_ORDER = {"GptOssForCausalLM"}
"""Architectures whose experts SGLang loads in checkpoint order although it maps the router's ids. Any other order of physical
ids silently generates wrong tokens (seen with 0.5.23 without this plugin)."""


def bad_numbers(cfg: Any) -> list[str]:
    """Numbers out of range, with which no server works and the other checks cannot compute."""
    given = [(f"--{name.replace('_', '-')} {getattr(cfg, name)}", getattr(cfg, name), least) for name, least in _LEAST.items()]
    out = [f"{flag}: must be {least} or more" for flag, value, least in given if value is not None and value < least]
    fraction = cfg.mem_fraction_static
    if fraction is not None and not 0 < fraction <= 1:
        out.append(f"--mem-fraction-static {fraction} (SGLang's choice if not given): must be above 0 and at most 1")
    return out


def problems(cfg: Any, model: Any) -> list[str]:
    """``cfg``: SGLang's resolved arguments; ``model``: its config of the model."""
    return [*_expert_location(cfg, model), *_files(cfg)]


def warnings(cfg: Any) -> Iterator[str]:
    """What fails a server (but not an engine) if it still holds once all weights are loaded."""
    if cfg.node_rank:
        return
    with socket.socket(socket.AF_INET6 if ":" in cfg.host else socket.AF_INET) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((cfg.host, cfg.port))
        except OSError as error:
            yield f"--port {cfg.port} on {cfg.host}: {error.strerror}; SGLang binds it only after loading all weights"


def _expert_location(cfg: Any, model: Any) -> Iterator[str]:
    """Problems of a physical-to-logical expert map, or of the counts from which SGLang makes one: a row per decoder layer."""
    value = cfg.init_expert_location
    if value == "trivial":
        return
    flag, names = f"--init-expert-location {value[:60]}", model.hf_config.architectures or []
    if IN_ORDER.intersection(names):
        yield f"{flag}: SGLang loads the experts of {names[0]} in checkpoint order and would generate wrong tokens; remove it"
        return
    try:
        shape, found = ModelConfigForExpertLocation.from_model_config(model), _read(value)
        table = torch.as_tensor(found[_MAP] if _MAP in found else found["logical_count"])
        rows, width = table.shape[-2:]
    except Exception:  # noqa: BLE001 -- of any type; SGLang's ranks raise it too, before they build the model
        return
    if shape is None:
        yield f"{flag}: SGLang does not support expert maps for {', '.join(names)} and fails at the first token; remove it"
        return
    layers, experts = shape.num_layers, shape.num_logical_experts
    places = experts + (cfg.ep_num_redundant_experts if _MAP in found else 0)
    absent = _MAP in found and any(set(range(experts)) - set(row) for row in table.tolist())
    if rows < layers or width != places or absent:
        every = ", with every logical expert present" if absent else ""
        yield f"{flag}: has {rows} layers of {width} experts, but SGLang needs {layers} of {places}{every}"


def _read(value: str) -> Any:
    if value.endswith(".pt"):
        return torch.load(value, weights_only=True, map_location="cpu")
    return json.loads(Path(value).read_text() if value.endswith(".json") else value)


def _files(cfg: Any) -> Iterator[str]:
    """Missing local files that SGLang opens only after loading all weights."""
    if cfg.speculative_algorithm == "NGRAM":
        yield from _absent("--speculative-ngram-external-corpus-path", cfg.speculative_ngram_external_corpus_path)
    if cfg.speculative_algorithm == "EAGLE" and (cfg.speculative_token_map or "").startswith(("/", ".", "~")):
        yield from _absent("--speculative-token-map", cfg.speculative_token_map)
    storage = cfg.hicache_storage_backend_extra_config or ""
    if cfg.enable_hierarchical_cache and cfg.hicache_storage_backend and storage.startswith("@"):
        yield from _absent("--hicache-storage-backend-extra-config", storage[1:])
    for flag, given in (("--chat-template", cfg.chat_template), ("--completion-template", cfg.completion_template)):
        if cfg.tokenizer_worker_num > 1 and (given or "").endswith((".jinja", ".json")):
            yield from _absent(flag, given)
    adapters = cfg.lora_paths or []
    for adapter in adapters.values() if isinstance(adapters, dict) else adapters:
        given = adapter.get("lora_path") if isinstance(adapter, dict) else getattr(adapter, "lora_path", adapter)
        path = str(given).rpartition("=")[2]
        if why := unreadable(path):
            yield f"--lora-paths {path}: {why}"
        elif os.path.isdir(path):
            yield from _absent("--lora-paths", os.path.join(path, "adapter_config.json"))


def _absent(flag: str, path: str | None) -> Iterator[str]:
    if path and not os.path.exists(path):
        yield f"{flag} {path}: no such file (SGLang opens it only after loading all weights)"
