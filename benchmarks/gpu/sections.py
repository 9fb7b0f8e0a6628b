"""The sections of a GPU session and their parts, in the order of the decisions they settle. Plain data: no CUDA, no torch."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
SMALL_GIB = 1 / 16
"""What a part takes where it runs at toy sizes."""
SECTION_SECONDS = 7.5 * 60
"""A section begins no part that may end after this."""


@dataclass(frozen=True)
class Part:
    """One process: ``program`` is "probe" (the compiled probe.cu), or a module of this folder."""

    name: str
    program: str
    expected: int
    """Seconds that it took on an H200, or should take where it has not run there yet."""
    limit: int
    """Seconds after which it begins nothing more; it is killed somewhat later."""
    managed_gib: float
    """The most managed memory that it holds at a time."""
    host_gib: float
    """The most host RAM that it holds at a time."""
    says: str


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


CHECKPOINT = Part("checkpoint", "server_parts", 16, 270, 0, 8, "Qwen3-30B-A3B's shape, 16 layers, routed as a measured trace")
LINK = Part("link", "probe", 5, 45, 1, 1, "the zero-copy and copy-engine ceilings of this run")
"""What a goal over the link's rate is judged by."""

PROBE = Section(
    "probe",
    "what unified memory does and costs on this GPU",
    (
        Part("demotion", "probe", 5, 40, 0.5, 1, "designs to hold residents: promote, demote, read (measurement 4)"),
        Part("prefetch", "probe", 36, 75, 1, 3, "prefetch against the copy engine; who waits (measurement 3)"),
        Part("stall", "probe", 15, 70, 0.6, 1, "what a running replay suffers from a promotion (measurement 5)"),
        Part("bandwidth", "probe", 95, 170, 24, 26, "zero-copy reads by memory, size and load (measurement 1)"),
        Part("reach", "probe", 45, 90, 24, 26, "reads of experts that lie far apart, also while all cores copy memory"),
        Part("amplification", "probe", 2, 30, 0.1, 1, "many readers of one tile (measurement 2)"),
        Part("residency", "probe", 2, 30, 2, 3, "telling residents by the latency of one read"),
        Part("alignment", "probe", 10, 60, 2.2, 3, "experts of several sizes side by side; host page sizes"),
        Part("advice", "probe", 17, 60, 1, 4, "advice by number of ranges; copies into new pages (measurement 8)"),
        Part("accounting", "probe", 3, 30, 4, 4, "free VRAM as the driver reports it (measurement 6)"),
        Part("host_memory", "probe", 3, 30, 4, 5, "host RAM along an expert's life (measurement 9)"),
        Part("populate", "probe", 18, 60, 2.1, 3, "host pages populated by 1 to 8 threads: prefetch, CPU writes, plain memory"),
        Part("extension", "ops_parts", 11, 40, 2, 3, "the same moves through the project's own extension and Python"),
        Part("numa", "probe", 8, 40, 1, 2, "managed memory on each NUMA node: accepted, where its pages lie, GB/s"),
        # Last: a fault that ends the context ends this part alone, and nothing after it meets the GPU in that state.
        Part("stall_tma", "probe", 25, 60, 0.6, 1, "bytes and time of reads by bulk copy and TMA while their expert moves"),
        Part("sustained", "probe", 25, 60, 0.7, 1, "p50 and p99 of a graph whose experts move all the time, by bytes a call"),
    ),
)

OPS = Section(
    "ops",
    "whether the extension and the memory layer keep their promises on the device",
    (
        Part("contract", "ops_parts", 13, 60, 0.5, 1, "every promise of Memory"),
        Part("counters", "ops_parts", 5, 40, 0.1, 1, "routing counters in a CUDA graph against a plain count"),
        Part("recording", "ops_parts", 5, 40, 0.1, 1, "expert ids recorded in CUDA graphs against the ids"),
        Part("moves", "ops_parts", 14, 80, 0.5, 1, "1,000 random moves under graph replay: same bits, no new capture"),
        Part("identity", "ops_parts", 9, 60, 2, 3, "bytes after random promotions and demotions"),
        Part("load", "ops_parts", 14, 80, 14, 8, "free VRAM and host RAM after a load against the prediction"),
        Part("start_link", "link_parts", 12, 50, 8, 10, "the link as a server measures it at start, and how long that takes"),
        Part("canary", "canary_parts", 10, 60, 0.1, 1, "what a launcher asks of the GPU, and whether that leaves a context"),
        Part("tables", "table_parts", 12, 50, 16, 18, "rows of a lookup table in host RAM beside one in VRAM: bytes and time"),
        Part(
            "copies",
            "stream_parts",
            30,
            100,
            1.2,
            5,
            "bytes that copies bring while blocks move; bytes that streamed layers read",
        ),
    ),
)

LAYER = Section(
    "layer",
    "what offloading costs a MoE layer under graph replay",
    (
        Part("check", "layer_parts", 8, 60, 0.1, 1, "the Triton MoE against torch"),
        Part("glm-4.5-air", "layer_parts", 25, 100, 9, 6, "GLM-4.5-Air, bf16 and FP8, by residency and batch"),
        Part("deepseek-v3", "layer_parts", 18, 100, 9, 6, "DeepSeek-V3, one rank of 8, likewise"),
        Part("glm-5", "layer_parts", 16, 100, 8, 6, "GLM-5, one rank of 8, likewise"),
        Part(
            "counters",
            "layer_parts",
            36,
            90,
            0.1,
            1,
            "routing counters of 75 layers, together and one by one, beside 75 MoE layers",
        ),
    ),
)

SERVER = Section(
    "server",
    "what offloading costs a whole server",
    (
        CHECKPOINT,
        Part("frequency", "server_parts", 160, 240, 20, 50, "all resident, then the most used 50 %: a server each"),
        Part("most", "server_parts", 150, 240, 20, 50, "all resident, then the most used 78 %"),
        LINK,
    ),
)

SERVING_SLOTS = Section(
    "serving_slots",
    "what slots gain a whole server, beside residents, alone, and against SGLang's paged experts on the same budget",
    (
        CHECKPOINT,
        LINK,
        Part("split", "server_parts", 330, 440, 23, 60, "all resident, then 25 % in VRAM: both, paged experts, either"),
    ),
)

DEFAULT = Section(
    "default",
    "what a server does with SGLang's own graphs and backends, whose traffic changes",
    (
        CHECKPOINT,
        Part("continuous", "server_parts", 185, 330, 20, 50, "all resident, then 50 % that follow the traffic"),
        Part("fixed", "server_parts", 165, 330, 20, 50, "all resident, then the most used 50 %, chosen once"),
        LINK,
    ),
)

MODES = Section(
    "modes",
    "whether a server answers alike in the modes that a launch may have besides",
    (
        Part("drafts", "modes_parts", 70, 330, 1, 8, "NEXTN, experts of draft layers offloaded, under graphs"),
        Part("updates", "modes_parts", 60, 330, 1, 8, "other weights from disk, after experts have moved"),
        Part("fp8", "modes_parts", 60, 330, 1, 8, "block-FP8 experts, and other weights from disk"),
        Part("gptq", "modes_parts", 60, 330, 1, 8, "GPTQ experts, by the runner that SGLang chooses"),
    ),
)

OTHER_MODES = Section(
    "other_modes",
    "likewise, in modes that fewer have",
    (
        Part("ngrams", "modes_parts", 60, 330, 1, 8, "drafts of n-grams"),
        Part("cache", "modes_parts", 60, 330, 1, 16, "a hierarchical cache"),
        Part("compiled", "modes_parts", 150, 500, 1, 8, "decode steps compiled by torch.compile, but for their experts"),
        Part("tma", "modes_parts", 60, 330, 1, 8, "tile configurations by which Triton's MoE kernels load experts by TMA"),
        Part("sleep", "modes_parts", 60, 330, 1, 8, "the server gives its memory up and has it back, with other weights"),
    ),
)

BOUNDS = Section(
    "bounds",
    "what simpler settings of this plugin cost a whole server",
    (
        Part("first_n", "server_parts", 190, 340, 20, 50, "all resident, 50 % streamed, read in place, and the first 50 %"),
        Part("bounds", "server_parts", 120, 240, 20, 50, "all resident, then no expert resident"),
    ),
)

PEERS = Section(
    "peers",
    "SGLang's paged experts on the same model and budget, in FP8 and more layers",
    (
        Part("fp8", "server_parts", 25, 150, 0, 8, "Qwen3-30B-A3B's shape in FP8, 30 layers, routed as a measured trace"),
        LINK,
        Part("paged_experts", "server_parts", 348, 440, 25.5, 60, "all resident, then 50 % in VRAM: slots, paged, neither"),
    ),
)

CPU_OFFLOAD = Section(
    "cpu_offload",
    "SGLang's --cpu-offload-gb on the same model and budget",
    (Part("cpu_offload_gb", "server_parts", 240, 340, 20, 60, "all resident, this plugin, --cpu-offload-gb at 50 %"),),
)

OFFLOADER = Section(
    "offloader",
    "the same against SGLang's OffloaderV2, which it has for DeepSeek's architecture only",
    (
        Part("deepseek", "server_parts", 90, 270, 0, 8, "DeepSeek-V3, one rank of 8, 12 layers, routed as a measured trace"),
        Part("offloader_v2", "server_parts", 200, 290, 25, 70, "all resident, this plugin, OffloaderV2 at 50 %"),
    ),
)

STREAM = Section(
    "stream",
    "how offloaded bytes come into VRAM, and what steps gain that stream",
    (
        Part("rates", "stream_parts", 29, 120, 4.5, 6, "copies of a layer by residency, alone and beside other kernels"),
        Part("steps", "stream_parts", 110, 200, 17, 14, "MoE steps of 64 to 32k tokens: resident, streamed, read in place"),
        Part("copies", "probe", 31, 65, 1, 3, "by copy engine and by kernel, alone and beside a memory-bound kernel"),
    ),
)

SLOTS = Section(
    "slots",
    "what slots cost, how fast misses fill them, and what a decode step gains",
    (
        Part("empty", "slots_parts", 30, 80, 0.1, 1, "resolving 75 layers with nothing to fill, beside their MoE and alone"),
        Part("fill", "slots_parts", 40, 90, 1.8, 2, "experts of 1.5 to 16 MiB into slots: kernel, copies and reads; bytes"),
        Part(
            "layer",
            "slots_parts",
            175,
            300,
            12,
            10,
            "decode steps of SGLang's Triton MoE in the same VRAM: residents, slots, both; outputs, counts, a streamed prompt",
        ),
    ),
)

RUNNERS = Section(
    "runners",
    "what SGLang's other MoE runners compute out of managed memory and slots",
    (
        LINK,
        Part("compiled", "runner_parts", 200, 420, 0, 4, "SGLang's Marlin kernels, side by side, before a part waits for them"),
        Part("marlin", "runner_parts", 51, 300, 0.3, 2, "steps of SGLang's Marlin MoE (MXFP4), in place and out of slots"),
        Part("deep_gemm", "runner_parts", 61, 330, 1, 2, "steps of SGLang's DeepGEMM MoE (FP8), likewise, in both layouts"),
    ),
)

MISS = Section(
    "miss",
    "whether a decode step reads an offloaded expert at the link's rate",
    (
        LINK,
        Part("pages", "miss_parts", 25, 80, 0.5, 2, "one expert at batch 1: MoE kernel, copy kernel, copy engine; host pages"),
    ),
)

EVICTION = Section(
    "eviction",
    "what a full card evicts; run last, because a driver under pressure is the likeliest to hang",
    (
        Part("swap", "probe", 10, 60, 2.1, 3, "a re-selection on a full card: is the VRAM of demoted experts used again"),
        Part("churn", "probe", 15, 60, 2.1, 3, "six re-selections on a full card: split blocks against whole ones"),
        Part("eviction", "probe", 6, 60, 2, 2, "a plain allocation near capacity; which headroom (measurement 7)"),
        Part("noticing", "eviction_parts", 15, 60, 1.6, 3, "whether this plugin notices that residents were evicted"),
    ),
)

SECTIONS = {
    section.name: section
    for section in (
        *(OPS, STREAM, SLOTS, SERVER, DEFAULT, MODES, OTHER_MODES, SERVING_SLOTS),
        *(CPU_OFFLOAD, BOUNDS, OFFLOADER, PEERS, PROBE, RUNNERS, MISS, LAYER, EVICTION),
    )
}


def too_much(part: Part, free_vram: int, host_available: int, small: bool) -> list[str]:
    """Every reason why the part must not start. Managed memory beyond a third of the free VRAM is refused whatever the
    part would do with it: oversubscribed managed memory can hang a GPU, and not for this process only."""
    reasons = []
    managed = SMALL_GIB if small else part.managed_gib
    host = SMALL_GIB if small else part.host_gib
    if managed * GIB >= free_vram / 3:
        third = f"a third of the free VRAM is {free_vram / 3 / GIB:.1f} GiB"
        reasons.append(f"{part.name} plans {managed:.1f} GiB of managed memory, and {third}")
    if host * GIB > 0.8 * host_available:
        reasons.append(f"{part.name} plans {host:.1f} GiB of host RAM, and {host_available / GIB:.1f} GiB are available")
    return reasons
