"""Refuses what SGLang 0.5.23 does not refuse in time: it would answer wrongly, or end only once all weights are loaded.

Where in SGLang, and what happens there:

    parallel sizes below 1                                   ignored, or no word of the flag; a plan cannot divide by them
    mem_cache.kv_cache_configurator                          --max-total-tokens, --context-length or --page-size below 1, a
                                                             share of VRAM that is none: ends after loading
    eplb.expert_location_dispatch                            fewer than no redundant experts: ends at the first token
    eplb.expert_location (_compute_logical_to_all_physical_map, ExpertLocationDispatchInfo)
                                                             a map without some expert: wrong tokens on a GPU
                                                             too few layers: ends after loading
    models.gpt_oss (load_weights)                            any map: wrong tokens
    models without get_model_config_for_expert_location      any map: ends at the first token
    lora.lora_manager (init_lora_adapters)                   an adapter that is not there: ends after loading
    speculative.ngram_worker (NGRAMWorker)                   a corpus that is not there: ends after loading
    speculative.eagle_worker_v2 (init_token_map)             a map of tokens that is not there: ends after loading
    mem_cache.hybrid_cache (parse_storage_backend_extra_config)
                                                             a file that is not there: ends after loading
    entrypoints.http_server (init_multi_tokenizer)           a template that is not there, with several tokenizer workers: ends
                                                             after loading
    entrypoints.http_server (_setup_and_run_http_server)     --port in use: ends after loading. A warning: it may be free then

SGLang itself refuses, in the launcher or before its ranks read weights: models without a class, load formats without their
package or files, drafts without a readable config, heads, experts and hidden units that ranks do not divide, GPUs with unequal
free VRAM, quantisations without their file, GPU or dtype, tokenizers, parsers, templates, the config of a diffusion model, and
maps of experts that it cannot read.
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
"""Architectures whose experts SGLang loads in the checkpoint's order, though it maps the router's ids: any other order of
physical ids serves wrong tokens, without an error (seen with 0.5.23, without this plugin)."""


def bad_numbers(cfg: Any) -> list[str]:
    """Numbers with which no server works, and with which the other checks cannot compute."""
    given = [(f"--{name.replace('_', '-')} {getattr(cfg, name)}", getattr(cfg, name), least) for name, least in _LEAST.items()]
    out = [f"{flag}: must be {least} or more" for flag, value, least in given if value is not None and value < least]
    fraction = cfg.mem_fraction_static
    if fraction is not None and not 0 < fraction <= 1:
        out.append(f"--mem-fraction-static {fraction} (SGLang's choice, if not given): must be above 0 and at most 1")
    return out


def problems(cfg: Any, model: Any) -> list[str]:
    """``cfg``: SGLang's resolved arguments; ``model``: its config of the model."""
    return [*_expert_location(cfg, model), *_files(cfg)]


def warnings(cfg: Any) -> Iterator[str]:
    """What would end the start of a server, but not of an engine, if it still holds once all weights are loaded."""
    if cfg.node_rank:
        return
    with socket.socket(socket.AF_INET6 if ":" in cfg.host else socket.AF_INET) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((cfg.host, cfg.port))
        except OSError as error:
            yield f"--port {cfg.port} on {cfg.host}: {error.strerror}; SGLang listens there once all weights are loaded"


def _expert_location(cfg: Any, model: Any) -> Iterator[str]:
    """Of a map from physical to logical experts, or of counts by which SGLang makes one: a row for each decoder layer."""
    value = cfg.init_expert_location
    if value == "trivial":
        return
    flag, names = f"--init-expert-location {value[:60]}", model.hf_config.architectures or []
    if IN_ORDER.intersection(names):
        yield f"{flag}: SGLang loads the experts of {names[0]} in the checkpoint's order, and would answer wrongly; remove it"
        return
    try:
        shape, found = ModelConfigForExpertLocation.from_model_config(model), _read(value)
        table = torch.as_tensor(found[_MAP] if _MAP in found else found["logical_count"])
        rows, width = table.shape[-2:]
    except Exception:  # noqa: BLE001 -- of any type; SGLang's ranks raise it too, before they build the model
        return
    if shape is None:
        yield f"{flag}: SGLang places no experts of {', '.join(names)} by a map, and would end at the first token; remove it"
        return
    layers, experts = shape.num_layers, shape.num_logical_experts
    places = experts + (cfg.ep_num_redundant_experts if _MAP in found else 0)
    absent = _MAP in found and any(set(range(experts)) - set(row) for row in table.tolist())
    if rows < layers or width != places or absent:
        every = ", each of the model's among them" if absent else ""
        yield f"{flag}: has {rows} layers of {width} experts, but SGLang needs {layers} of {places}{every}"


def _read(value: str) -> Any:
    if value.endswith(".pt"):
        return torch.load(value, weights_only=True, map_location="cpu")
    return json.loads(Path(value).read_text() if value.endswith(".json") else value)


def _files(cfg: Any) -> Iterator[str]:
    """Local files that SGLang opens once all weights are loaded."""
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
        yield f"{flag} {path}: no such file; SGLang opens it once all weights are loaded"
