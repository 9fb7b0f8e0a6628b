"""The MoE layers that the ``layer`` section builds: what one GPU of a deployment holds of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

FP8_BLOCK = 128


@dataclass(frozen=True)
class MoeShape:
    name: str
    layers: int
    """Layers that are built: enough that no cache holds one step's weights."""
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    """Of one expert on this rank."""

    def expert_bytes(self, fp8: bool) -> int:
        """Both matrices of one expert, without the scales."""
        return 3 * self.hidden * self.intermediate * (1 if fp8 else 2)

    @property
    def toy(self) -> MoeShape:
        """The same routing over small matrices whose experts still fill a page."""
        return replace(self, layers=1, hidden=256, intermediate=128)


GLM_45_AIR = MoeShape("glm-4.5-air", 2, 128, 8, 4096, 1408)
GLM_5 = MoeShape("glm-5", 3, 256, 8, 6144, 2048 // 8)
DEEPSEEK_V3 = MoeShape("deepseek-v3", 3, 256, 8, 7168, 2048 // 8)
SHAPES = {shape.name: shape for shape in (GLM_45_AIR, GLM_5, DEEPSEEK_V3)}
