"""Builds SGLang's models on torch's ``meta`` device, where tensors have shapes but no memory, as a single rank.

Call ``start`` once, first, in a process that does nothing else: SGLang's classes query the machine while they are built, and
``start`` hides it from them.
"""

from __future__ import annotations

import importlib
import json
import socket
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.bootstrap import init_parallel_runtime
from sglang.srt.layers import quantization
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.layers.quantization import marlin_utils, modelopt_quant
from sglang.srt.layers.quantization.awq import awq
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.model_loader import loader
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import SpawnRanks, get_model, publish
from sglang.srt.server_args import ServerArgs
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from sglang_uvm_offload.plan.architectures import model_files
from sglang_uvm_offload.plan.model_shape import LayerShape, ModelShape
from sglang_uvm_offload.plan.moe_shape import stated_drafts, stated_top_k
from sglang_uvm_offload.plan.safetensors_header import NoExperts
from sglang_uvm_offload.plugin.meta.cache import kv_of
from sglang_uvm_offload.plugin.meta.tensors import Counted, CountedLayer, counted, counted_layer

_ANY_MODEL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    **{"hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 128, "vocab_size": 512},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64},
    **{"num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 512, "torch_dtype": "bfloat16"},
}
"""SGLang needs a model to resolve its arguments. Any model works, because none is served."""

_SHAPELESS: dict[str, Any] = {
    **{"pad_token_id": 0, "hidden_act": "silu", "rope_theta": 1e4, "attention_dropout": 0.0, "initializer_range": 0.02},
    **dict.fromkeys(("rms_norm_eps", "layernorm_epsilon"), 1e-6),
    **{"norm_topk_prob": True, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "rope_scaling": None},
}
"""Config values that SGLang's classes read and the checkpoint's own config class would default. No shape depends on them. If
any other value is missing, building fails."""

_FILES = ("config.json", "hf_quant_config.json")


class _Models(Mapping[str, Any]):
    """A replacement for SGLang's registry that imports a model's file on first use."""

    def __init__(self) -> None:
        self.files = model_files()

    def __getitem__(self, name: str) -> Any:
        with torch.device("cpu"):  # some files compute with tensors at import
            found = getattr(importlib.import_module(f"sglang.srt.models.{self.files[name]}"), name)
        if dots3 := sys.modules.get("sglang.srt.models.dots3_common.modeling"):
            vars(dots3)["_require_cuda"] = lambda: None
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def start() -> None:
    """Start SGLang's runtime for a single rank, as in a scheduler on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_ANY_MODEL))
        arguments = ServerArgs(
            model_path=folder,
            device="cpu",
            attention_backend="torch_native",
            mem_fraction_static=0.3,
            disable_shared_experts_fusion=True,
        )
        arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    initialize_moe_config()
    ModelRegistry.models = _Models()
    _see_no_machine()


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        """A replacement for ``torch.cuda.Stream`` without a device."""


def _see_no_machine() -> None:
    """Answer SGLang's queries about the machine like a recent GPU, because some classes support nothing else."""
    kernels = types.ModuleType("vllm._custom_ops")
    vars(kernels)["rotary_embedding"] = None
    sys.modules.update({"vllm": types.ModuleType("vllm"), kernels.__name__: kernels})
    factory.get_rope_cpu = lambda *arguments: factory.get_rope(*arguments[:8])
    answers = {"get_device_capability": lambda *_: (10, 0), "current_device": lambda: "cpu", "Stream": _Stream}
    vars(torch.cuda).update(answers)
    current_platform.get_device = lambda *_: "cpu"
    modelopt_quant.get_platform = lambda: types.SimpleNamespace(is_blackwell=True)
    # AWQ's and GPTQ's Marlin forms need CUDA. Without it AWQ would leave experts unquantised, and GPTQ would be unknown.
    vars(awq)["_is_cuda"] = True
    marlin_utils.get_device_capability = answers["get_device_capability"]
    quantization.QUANTIZATION_METHODS.setdefault("mxfp4", Mxfp4Config)  # SGLang registers it for CUDA only


def described(folder: Path, **given: str | None) -> ModelShape:
    """The shape of the model that ``folder`` configures, as a server would hold it. ``given`` are arguments of ``ModelConfig``.

    The code of a checkpoint, including its config class, does not run. If the class of the same model type in transformers or
    SGLang does not fit, the config is read verbatim."""
    try:
        return _described(folder, given)
    except NoExperts:
        raise
    except Exception as error:  # a model's class may raise any type; re-raised below if the second attempt also fails
        model_type = json.loads((folder / "config.json").read_text()).get("model_type")
        if not model_type:
            raise
        _read_as_stated(model_type)
        try:
            return _described(folder, given)
        except Exception:  # noqa: BLE001 -- the first error is more useful
            raise error from None


def _described(folder: Path, given: Mapping[str, Any]) -> ModelShape:
    with tempfile.TemporaryDirectory() as copy:
        _copy_without_code(folder, Path(copy))
        config = _read(copy, given)
        top_k, number = stated_top_k(config.hf_text_config), stated_drafts(config.hf_text_config)
        draft = _read(copy, given, draft=True) if number else None
        drafts = number if draft is not None and draft.hf_config.architectures != config.hf_config.architectures else 0

        def models(quantised: bool) -> tuple[Counted, CountedLayer | None]:
            built, hidden = _built(_read(copy, given), quantised), config.hidden_size
            drafted = _built(_read(copy, given, draft=True), quantised) if drafts else None
            return counted(built, top_k, hidden), None if drafted is None else counted_layer(drafted, top_k, hidden)

        return _shape(config, *models(quantised=False), *models(quantised=True), drafts)


def _shape(
    config: ModelConfig,
    plain: Counted,
    plain_draft: CountedLayer | None,
    served: Counted,
    draft: CountedLayer | None,
    drafts: int,
) -> ModelShape:
    """``plain`` is the unquantised model, for counting weights. ``served`` is the quantised one, for counting bytes."""
    layers = tuple(
        layer.shape(index, counted.sums["parameters"])
        for index, (layer, counted) in enumerate(zip(served.layers, plain.layers, strict=True))
    )
    draft_layers: tuple[LayerShape, ...] = ()
    draft_parameters = 0
    if draft is not None and plain_draft is not None:
        of_one = plain_draft.sums["parameters"]
        draft_layers = tuple(draft.shape(len(layers) + number, of_one) for number in range(drafts))
        draft_parameters = drafts * (of_one + plain_draft.sums["routed_parameters"])
    routed = [layer for layer in plain.layers if layer.experts]
    outside = plain.outside_parameters + plain.tower_parameters + plain.table_parameters
    tables = sum(table.nbytes for table in served.tables)
    text = config.hf_text_config
    return ModelShape(
        name="",
        num_layers=len(layers),
        num_experts=max(layer.experts for layer in routed),
        top_k=max(layer.top_k for layer in routed),
        context_length=config.context_len,
        layers=layers,
        draft_layers=draft_layers,
        embedding=served.embedding,
        head=served.head,
        other=served.other,
        total_bytes=sum(layer.nbytes for layer in (*layers, *draft_layers))
        + tables
        + served.embedding
        + served.head
        + served.other,
        total_parameters=sum(layer.sums["parameters"] + layer.sums["routed_parameters"] for layer in plain.layers)
        + outside
        + draft_parameters,
        expert_parameters=max(layer.sums["expert_parameters"] for layer in routed),
        kv=kv_of(config, len(layers)),
        heads=config.num_attention_heads,
        quantization=config.quantization or "none",
        expert_size=routed[0].expert_size,
        hidden_size=config.hidden_size,
        scale_block=_scale_block(config),
        family=str(text.model_type or ""),
        architectures=tuple(config.hf_config.architectures),
        draft_parameters=draft_parameters,
        active_parameters=sum(
            layer.sums["parameters"] + layer.top_k * layer.sums["expert_parameters"] for layer in plain.layers
        )
        + plain.outside_parameters,
        shared_parameters=sum(layer.sums["shared_parameters"] for layer in plain.layers),
        tower_parameters=plain.tower_parameters,
        embedding_parameters=plain.embedding_parameters,
        tables=tuple(served.tables),
    )


def _scale_block(config: ModelConfig) -> int:
    block = config.hf_quant_config.get("weight_block_size")
    return int(block[0]) if block else 1


def _read(folder: str, given: Mapping[str, Any], draft: bool = False) -> ModelConfig:
    """The config as SGLang reads it, with the RoPE base where SGLang's classes expect it. No shape depends on the base."""
    read = ModelConfig(folder, trust_remote_code=False, is_draft_model=draft, **given)
    for config in (read.hf_config, read.hf_text_config):
        if getattr(config, "rope_parameters", None) is None and (base := getattr(config, "rope_theta", None)):
            config.rope_parameters = {"rope_theta": base, "rope_type": "default"}
    return read


def _built(config: ModelConfig, quantised: bool) -> torch.nn.Module:
    load = LoadConfig(load_format="dummy")
    with _default_dtype(config.dtype), get_model().override(model_path=config.model_path):
        method = loader._get_quantization_config(config, load) if quantised else None
        if isinstance(method, Fp8Config):
            # Otherwise layers are built in the checkpoint's dtype and get the method's only after loading.
            method.is_checkpoint_fp8_serialized = True
        while True:
            try:
                with torch.device("meta"), _OnMeta():
                    return loader._initialize_model(config, load, method)
            except AttributeError as error:
                if not isinstance(error.obj, PretrainedConfig) or error.name not in _SHAPELESS:
                    raise
                setattr(error.obj, error.name, _SHAPELESS[error.name])


class _OnMeta(TorchFunctionMode):
    """Replaces operations that some towers run during construction and that fail without memory: reading computed values, and
    moving modules to another device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.linspace:
            kwargs["device"] = "cpu"
        if kwargs.get("device") == "cuda":  # LongCat's n-grams: its class reads these row counts
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and args[0].is_meta:
            _, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
            args, kwargs = (args[0], "meta", dtype), {}
        return func(*args, **kwargs)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _copy_without_code(folder: Path, copy: Path) -> None:
    """Copy the configuration without its ``auto_map``, so that no code of the checkpoint runs."""
    for name in _FILES:
        if (folder / name).exists():
            value = json.loads((folder / name).read_text())
            for part in (value, *(inner for inner in value.values() if isinstance(inner, dict))):
                part.pop("auto_map", None)
            (copy / name).write_text(json.dumps(value))
            if name == "config.json":
                _make_known(value)


def _make_known(config: dict[str, Any]) -> None:
    """Make transformers read a config verbatim if its class is part of the checkpoint's code."""
    model_type = config.get("model_type")
    importlib.import_module("sglang.srt.utils.hf_transformers_utils")  # registers SGLang's config classes
    if not isinstance(model_type, str) or not model_type or model_type in CONFIG_MAPPING:
        return
    _read_as_stated(model_type)


def _read_as_stated(model_type: str) -> None:
    stated = type("AsStated", (PretrainedConfig,), {"model_type": model_type, "__init__": _keep_as_stated})
    AutoConfig.register(model_type, stated, exist_ok=True)


def _keep_as_stated(self: PretrainedConfig, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, dict) and name in ("text_config", "vision_config", "audio_config", "llm_config"):
            values[name] = PretrainedConfig(**value)
    PretrainedConfig.__init__(self, **values)
