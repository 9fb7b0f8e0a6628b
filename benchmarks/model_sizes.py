"""Compares model sizes that ``plan`` derives from published configurations with stated sizes.

``python -m benchmarks.model_sizes CONFIGS`` writes the page. CONFIGS has a folder ``OWNER--NAME`` for each model of
``model_sizes.json``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_uvm_offload.plan.engine_shape import shapes_of
from sglang_uvm_offload.plan.model_shape import ModelShape

HERE = Path(__file__).resolve().parent
PUBLISHED: dict[str, dict[str, Any]] = json.loads((HERE / "model_sizes.json").read_text())["models"]
OUT = HERE / "results" / "architectures" / "architectures.md"
WITHIN = 0.02
"""The largest relative error of a total that counts as near."""

HEAD = """# Models by their config.json alone

Made by `benchmarks/model_sizes.py`: SGLang's own class of each model is built without weights, and what `plan` takes from
it is compared with what *source* states: the publisher, or where its page could not be read, another page about the model.
Billions of weights; *experts* are the bytes of all routed experts as quantised. Draft layers are not counted. The active
weights are those that one token of text is computed with, with embedding and head. *Without* says what was left out of a row
to compare, because the statement fits only so: the tower for images of the total, the embedding of the active weights.
Statements are rounded, mostly to whole billions, and Moonshot's of Kimi-K2 and K2.5, "1T", to whole trillions; Kimi-Linear's
checkpoint has 49,122,681,728 weights, which is what is planned.

| model | total | stated | difference | active | stated | experts GB | without | source |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |
"""


@dataclass(frozen=True)
class Row:
    model: str
    total: float
    """Weights in billions, as ``active``, without what the publisher leaves out."""
    active: float
    expert_bytes: int
    stated: dict[str, Any]

    @property
    def difference(self) -> float:
        return float(self.total / self.stated["total"] - 1)

    def line(self) -> str:
        without = ", ".join(name for name in ("tower", "embedding") if self.stated.get(name))
        shown = (
            *(f"{self.total:.1f}", f"{self.stated['total']:g}", f"{self.difference:+.1%}"),
            *(f"{self.active:.1f}", f"{self.stated['active']:g}", f"{self.expert_bytes / 1e9:.1f}", without),
        )
        return f"| {self.model} | {' | '.join(shown)} | [{self.stated['source'].split('/')[2]}]({self.stated['source']}) |\n"


def row(model: str, shape: ModelShape) -> Row:
    stated = PUBLISHED[model]
    total = shape.total_parameters - shape.draft_parameters
    total -= shape.tower_parameters if stated.get("tower") else 0
    active = shape.active_parameters - (shape.embedding_parameters if stated.get("embedding") else 0)
    return Row(model, total / 1e9, active / 1e9, shape.expert_bytes, stated)


def rows(configs: Path, models: list[str]) -> list[Row]:
    folders = {model: configs / model.replace("/", "--") for model in models}
    return [row(model, shape) for model, shape in zip(folders, shapes_of(folders), strict=True)]


def page(found: list[Row]) -> str:
    near = sum(abs(each.difference) <= WITHIN for each in found)
    lines = "".join(each.line() for each in found)
    return f"{HEAD}{lines}\n{near} of {len(found)} totals are within {WITHIN:.0%} of the statement.\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(arguments)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page(rows(args.configs, list(PUBLISHED))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
