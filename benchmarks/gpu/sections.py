"""The sections of a GPU session and their parts, in the order of the decisions they settle. Plain data: no CUDA, no torch."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
SMALL_GIB = 1 / 16
"""Memory that a part takes at toy sizes."""


@dataclass(frozen=True)
class Part:
    """A part runs as one process. ``program`` is a module of this folder."""

    name: str
    program: str
    expected: int
    """Seconds that it took on an H200, or an estimate if it has not run there yet."""
    limit: int
    """Seconds after which it begins nothing more; the session kills it somewhat later."""
    managed_gib: float
    """Peak managed memory."""
    host_gib: float
    """Peak host RAM."""
    decides: str


@dataclass(frozen=True)
class Section:
    name: str
    question: str
    parts: tuple[Part, ...]

    @property
    def expected(self) -> int:
        return sum(part.expected for part in self.parts)

    @property
    def managed_gib(self) -> float:
        return max(part.managed_gib for part in self.parts)

    @property
    def host_gib(self) -> float:
        return max(part.host_gib for part in self.parts)


LINK = Part("link", "host_parts", 12, 50, 8, 10, "the link's rates, which goals and the cost model refer to")

OPS = Section(
    "ops",
    "whether the memory layer keeps its promises, and how fast host memory is",
    (
        Part("contract", "ops_parts", 13, 60, 0.5, 1, "whether every promise of Memory holds on this driver"),
        Part("moves", "ops_parts", 14, 80, 0.5, 1, "whether graphs stay valid and compute the same bits in 1,000 moves"),
        Part("load", "ops_parts", 14, 80, 14, 8, "whether VRAM and host RAM after a load are what the planner predicts"),
        Part("canary", "canary_parts", 10, 60, 0.1, 1, "whether a launcher's queries leave a CUDA context on the GPU"),
        LINK,
        Part("reach", "host_parts", 20, 90, 24, 26, "whether experts scattered over 24 GiB are read as fast as neighbours"),
        Part("populate", "host_parts", 20, 60, 2, 3, "whether reader threads populate host RAM faster than a prefetch"),
        Part("writes", "host_parts", 8, 40, 0.5, 2, "whether the CPU should write loaded weights into host RAM itself"),
        Part("sustained", "ops_parts", 10, 40, 0.7, 1, "how many bytes may move in one call while steps run"),
    ),
)

SLOTS = Section(
    "slots",
    "what it costs to bring missed experts into VRAM",
    (
        Part("resolve", "slots_parts", 24, 70, 0.1, 1, "whether resolving slots is cheap enough: microseconds per layer"),
        Part("fill", "slots_parts", 40, 90, 1.8, 2, "whether one kernel can both decide and copy: rates and bytes by size"),
        Part("overlap", "slots_parts", 8, 40, 0.5, 1, "whether misses cost less when their second part overlaps a GEMM"),
        Part(
            "ahead",
            "slots_parts",
            8,
            40,
            0.8,
            1,
            "whether lookahead makes a step faster, and wrong guesses slower",
        ),
        Part("bring", "slots_parts", 20, 60, 0.4, 0.4, "how fast slots take a layer beside another kernel, and at what cost"),
    ),
)

RUNNERS = Section(
    "runners",
    "whether SGLang's MoE runners compute the same from managed memory and from slots",
    (
        LINK,
        Part("compiled", "runner_parts", 200, 420, 0, 4, "nothing: compiles SGLang's Marlin kernels before a part needs them"),
        Part("triton", "runner_parts", 60, 200, 0.6, 3, "whether Triton (bf16, FP8) may compute in place and from slots"),
        Part("marlin", "runner_parts", 51, 300, 0.3, 2, "whether Marlin (MXFP4) may too"),
        Part("deep_gemm", "runner_parts", 61, 330, 1, 2, "whether DeepGEMM (FP8) may too, and in which layout"),
    ),
)

SERVER = Section(
    "server",
    "what offloading costs a whole server; takes several calls",
    (
        LINK,
        Part(
            "fp8", "server_parts", 25, 150, 0, 8, "nothing: writes Qwen3-30B-A3B's shape in FP8, 30 layers, routed as a trace"
        ),
        Part("decode", "server_parts", 400, 440, 25.5, 60, "residents, slots or paged experts; stream buffers or more slots"),
        Part("bf16", "server_parts", 16, 270, 0, 8, "nothing: writes Qwen3-30B-A3B's shape, 16 layers, routed as a trace"),
        Part(
            "most", "server_parts", 150, 240, 20, 50, "what offloading costs with 78 % in VRAM, prompts of 512 to 32,000 tokens"
        ),
        Part("no_resident", "server_parts", 90, 240, 20, 50, "whether a server with no expert in VRAM gives the same answers"),
        Part("cpu_offload_gb", "server_parts", 240, 340, 20, 60, "this plugin or SGLang's --cpu-offload-gb"),
        Part("deepseek", "server_parts", 90, 270, 0, 8, "nothing: writes DeepSeek-V3's shape, one rank of 8, 12 layers"),
        Part("offloader_v2", "server_parts", 200, 290, 25, 70, "this plugin or SGLang's OffloaderV2 (DeepSeek only)"),
    ),
)

MODES = Section(
    "modes",
    "whether offloading gives the same answers in other SGLang modes; takes several calls",
    (
        Part("updates", "modes_parts", 60, 330, 1, 8, "whether weights updated from disk reach experts that have moved"),
        Part("fp8", "modes_parts", 60, 330, 1, 8, "the same with block-FP8 experts"),
        Part("gptq", "modes_parts", 60, 330, 1, 8, "whether GPTQ experts may be offloaded"),
        Part("ngrams", "modes_parts", 60, 330, 1, 8, "whether n-gram drafts give the same answers"),
        Part("cache", "modes_parts", 60, 330, 1, 16, "whether a hierarchical cache gives the same answers"),
        Part("compiled", "modes_parts", 150, 420, 1, 8, "whether steps under torch.compile read experts in place"),
        Part("tma", "modes_parts", 60, 330, 1, 8, "whether Triton's MoE kernels may load experts by TMA"),
        Part("sleep", "modes_parts", 60, 330, 1, 8, "whether a server that releases its memory gets its experts back"),
    ),
)

EVICTION = Section(
    "eviction",
    "what happens when VRAM is full; runs last, because a driver under pressure is most likely to hang",
    (Part("noticing", "eviction_parts", 15, 60, 1.6, 3, "whether the plugin notices evicted residents, and no others"),),
)

SECTIONS = {section.name: section for section in (OPS, SLOTS, RUNNERS, SERVER, MODES, EVICTION)}


def too_much(part: Part, free_vram: int, host_available: int, small: bool) -> list[str]:
    """Lists every reason why the part must not start. Managed memory beyond a third of the free VRAM is always refused:
    oversubscribed managed memory can hang the GPU, and not only for this process."""
    reasons = []
    managed = SMALL_GIB if small else part.managed_gib
    host = SMALL_GIB if small else part.host_gib
    if managed * GIB >= free_vram / 3:
        third = f"a third of the free VRAM is {free_vram / 3 / GIB:.1f} GiB"
        reasons.append(f"{part.name} plans {managed:.1f} GiB of managed memory, and {third}")
    if host * GIB > 0.8 * host_available:
        reasons.append(f"{part.name} plans {host:.1f} GiB of host RAM, and {host_available / GIB:.1f} GiB are available")
    return reasons
