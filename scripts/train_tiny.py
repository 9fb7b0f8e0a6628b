"""Train the tiny model of GLM-4.5 architecture that the quickstart and the tests serve, on one core of a CPU, in minutes.

    python -m scripts.train_tiny scripts/tiny
    python -m scripts.train_tiny /tmp/deep --shape deep

The model learns two topics, English prose and Python code, from the standard library of the Python that runs this script (PSF
licence). Prose is the sentences of docstrings and of ``pydoc_data.topics``; code is functions and classes without docstrings
and comments. Half of the texts are answers in a chat ("Explain shutil.copytree.", "Write heapq.merge."), for
``/v1/chat/completions``. One module in ``HELD_OUT`` is held out.

The model is ``Glm4MoeForCausalLM`` of transformers: a sigmoid router that chooses the top-k experts with
``e_score_correction_bias``. There is no balancing loss. Each step moves the biases towards equal load over both topics
together, as published models of this architecture were trained, so each topic may get experts of its own.

``--shape deep`` has more MoE layers with more experts, for tests and benchmarks that need several, and trains for most of an
hour.

Everything is seeded: the same Python, PyTorch, transformers and tokenizers on the same kind of CPU give the same files. The
checkpoint's README.md names the versions and has the measured perplexity and routing.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import json
import math
import platform
import random
import re
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.make_checkpoint import END, FAMILIES, ROLES, Shape, save_tokenizer

SHAPE = Shape(layers=3, hidden=128, heads=2, kv_heads=1, experts=16, top_k=2, expert_size=256, dense_size=256)
SHAPES = {"tiny": SHAPE, "deep": dataclasses.replace(SHAPE, layers=9, experts=32, top_k=4)}
DENSE_LAYERS = 1  # the first
VOCAB = 2048
TOPICS = ("prose", "code")
HELD_OUT = 20  # one in so many modules and pydoc topics
CHAT = 0.5  # the share of texts in chat form

SEED = 0
THREADS = 1
ROWS, CONTEXT = 4, 256  # the shape of a batch; half of the rows are from each topic
STEPS = 1400
LEARNING_RATE, WARMUP_STEPS = 2e-3, 100
BIAS_STEP = 2e-3  # how far a step moves a bias of the router

RESIDENT = 6  # experts per layer in the README's table of hit rates
PROMPTS = ("If the argument is", "def read(self", "<|user|>Explain heapq.<|end|><|assistant|>")
EXCERPTS, EXCERPT = 4, 600  # held-out texts per topic for the tests, and their maximum length in characters

# ---------------------------------------------------------------- text


def paragraphs(text: str) -> str:
    """The paragraphs of ``text`` that are sentences, one per line, without lists, examples, signatures and tables."""
    joined = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "\n".join(line for line in joined if re.fullmatch(r"[A-Z][\w',]* [^<>{}\[\]|=*>]{20,}[.:]", line))


def without_docstrings(tree: ast.AST) -> ast.AST:
    """Remove docstrings from ``tree`` in place, and return it."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def modules() -> Iterator[tuple[str, ast.Module]]:
    """The name and syntax tree of each module of the standard library that is a single file."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        yield path.stem, ast.parse(path.read_text(encoding="utf-8"))


def texts() -> Iterator[tuple[str, str, str, str]]:
    """``(topic, source, name, text)`` for each text: ``name`` is what it is about, ``source`` its module or pydoc topic."""
    for name, text in sorted(topics.items()):
        yield "prose", name, name, paragraphs(text)
    for module, tree in modules():
        yield "prose", module, module, paragraphs(ast.get_docstring(tree) or "")
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                name = f"{module}.{node.name}"
                yield "prose", module, name, "\n".join(filter(None, map(paragraphs, docstrings(node))))
                yield "code", module, name, ast.unparse(without_docstrings(node))


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield ast.get_docstring(node) or ""


def question(topic: str, name: str) -> str:
    return f"Explain {name}." if topic == "prose" else f"Write {name}."


def is_held_out(source: str) -> bool:
    return zlib.crc32(source.encode()) % HELD_OUT == 0


def corpus() -> tuple[dict[str, list[tuple[str, str]]], dict[str, list[tuple[str, str]]]]:
    """The ``(name, text)`` pairs to train on, by topic, and those held out."""
    train: dict[str, list[tuple[str, str]]] = {topic: [] for topic in TOPICS}
    held: dict[str, list[tuple[str, str]]] = {topic: [] for topic in TOPICS}
    for topic, source, name, text in texts():
        if text:
            (held if is_held_out(source) else train)[topic].append((name, text))
    return train, held


# ---------------------------------------------------------------- tokenizer


def make_tokenizer(train: dict[str, list[tuple[str, str]]]) -> Tokenizer:
    """A byte-level BPE tokenizer, trained on both topics."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END, *ROLES], initial_alphabet=alphabet, show_progress=False
    )
    # The same amount of text from each topic, so that it learns pairs of both.
    size = min(sum(len(text) for _, text in train[topic]) for topic in TOPICS)
    tokenizer.train_from_iterator(["\n".join(text for _, text in train[topic])[:size] for topic in TOPICS], trainer)
    return tokenizer


def stream(tokenizer: Tokenizer, topic: str, documents: list[tuple[str, str]], chat: float) -> torch.Tensor:
    """int64 ``[tokens]``: the documents in random order, each ended by ``END``, the share ``chat`` of them in chat form."""
    draw = random.Random(SEED)
    documents = draw.sample(documents, len(documents))
    asked = [f"{ROLES[1]}{question(topic, name)}{END}{ROLES[2]}" if draw.random() < chat else "" for name, _ in documents]
    text = [f"{before}{text}\n{END}" for before, (_, text) in zip(asked, documents, strict=True)]
    return torch.tensor([token for encoding in tokenizer.encode_batch(text) for token in encoding.ids])


# ---------------------------------------------------------------- model


def config(shape: Shape = SHAPE) -> dict[str, Any]:
    return FAMILIES["glm4_moe"].config(shape) | {
        "vocab_size": VOCAB,
        "first_k_dense_replace": DENSE_LAYERS,
        "routed_scaling_factor": 1.0,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
        "torch_dtype": "bfloat16",
    }


def make_model(shape: Shape = SHAPE) -> transformers.Glm4MoeForCausalLM:
    return transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**config(shape)))


class Routing:
    """Counts the tokens that each MoE layer's router sends to each expert since the last ``clear``."""

    def __init__(self, model: transformers.Glm4MoeForCausalLM):
        self.gates = [layer.mlp.gate for layer in model.model.layers[DENSE_LAYERS:]]
        self.clear()
        for index, gate in enumerate(self.gates):
            gate.register_forward_hook(lambda _module, _inputs, outputs, index=index: self.count(index, outputs[2]))

    def clear(self) -> None:
        self.counts = torch.zeros(len(self.gates), len(self.gates[0].weight))

    def count(self, index: int, chosen: torch.Tensor) -> None:
        self.counts[index] += torch.bincount(chosen.flatten(), minlength=self.counts.shape[1])

    def balance(self) -> None:
        """Move each expert's bias by one step towards the mean load, and clear the counts."""
        for gate, count in zip(self.gates, self.counts, strict=True):
            gate.e_score_correction_bias += BIAS_STEP * torch.sign(count.mean() - count)
        self.clear()


def train_model(model: transformers.Glm4MoeForCausalLM, streams: list[torch.Tensor], steps: int) -> None:
    routing = Routing(model)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    generator = torch.Generator().manual_seed(SEED)
    begin = time.monotonic()
    for step in range(1, steps + 1):
        batch = torch.cat([rows(tokens, ROWS // len(streams), generator) for tokens in streams])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        routing.balance()
        if step % 50 == 0 or step == steps:
            print(f"step {step} of {steps}: loss {loss.item():.3f}, {time.monotonic() - begin:.0f} s", flush=True)


def learning_rate(step: int, steps: int) -> float:
    """The factor on ``LEARNING_RATE``: a linear warm-up to 1, then a cosine decay to 0."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return (1 + math.cos(math.pi * step / steps)) / 2


def rows(tokens: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """int64 ``[count, CONTEXT]``: rows of ``tokens`` from random positions."""
    begins = torch.randint(len(tokens) - CONTEXT, (count, 1), generator=generator)
    return tokens[begins + torch.arange(CONTEXT)]


def save_weights(model: transformers.Glm4MoeForCausalLM, folder: Path) -> None:
    """Save in bfloat16 under the names of published GLM-4.5 checkpoints: a tensor for each projection of each expert."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        prefix, experts, part = name.partition(".experts.")
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensor
        elif not experts:
            tensors[name] = tensor.bfloat16()
        else:
            projections = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[part]
            for expert, weights in enumerate(tensor.bfloat16()):
                for projection, weight in zip(projections, weights.chunk(len(projections)), strict=True):
                    tensors[f"{prefix}.experts.{expert}.{projection}.weight"] = weight.contiguous()
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


# ---------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(model: transformers.Glm4MoeForCausalLM, routing: Routing, tokens: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The mean loss in nats per token, and the number of ``tokens`` routed to each expert, ``[layers, experts]``."""
    routing.clear()
    whole = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    losses = [model(input_ids=part, labels=part, use_cache=False).loss.item() * len(part) for part in whole.split(ROWS)]
    return sum(losses) / len(whole), routing.counts


@torch.no_grad()
def answer(model: transformers.Glm4MoeForCausalLM, tokenizer: Tokenizer, prompt: str) -> str:
    ids = tokenizer.encode(prompt).ids
    made = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=48, do_sample=False, pad_token_id=0
    )
    return tokenizer.decode(made[0, len(ids) :].tolist())


def served(counts: torch.Tensor, by: torch.Tensor) -> float:
    """The hit rate of ``counts`` with the ``RESIDENT`` most used experts of each layer in ``by`` resident."""
    best = by.topk(RESIDENT, dim=1).indices
    return (counts.gather(1, best).sum() / counts.sum()).item()


def readme(shape: Shape, figures: str, trained: dict[str, list[tuple[str, str]]], tensors: Path, steps: int) -> str:
    text = "".join(f"{topic}{name}{text}" for topic in TOPICS for name, text in trained[topic])
    size = ", ".join(f"{sum(len(text) for _, text in trained[topic]) / 1e6:.1f} MB of {topic}" for topic in TOPICS)
    versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}, transformers {transformers.__version__}, "
    versions += f"tokenizers {tokenizers.__version__}, one CPU thread"
    return f"""\
# A tiny GLM-4.5-architecture model for English prose and Python code

Written by `scripts/train_tiny.py` ({steps} steps), like this page, for tests and the quickstart. It knows little.

- Architecture: `Glm4MoeForCausalLM`, {shape.layers} layers, {shape.layers - DENSE_LAYERS} of them with {shape.experts} routed
  experts and a shared one, {shape.top_k} routed experts per token, bfloat16. Each projection of an expert
  has at least 64 KiB, the smallest tensor that is offloaded.
- Text: {size}, from Python's standard library: its docstrings and help topics
  (`pydoc_data.topics`), and its source without docstrings and comments.
- Licence of the text, and so of the weights, the tokenizer and `held_out.json`: [PSF License Version
  2](https://docs.python.org/3/license.html). {sys.copyright.splitlines()[0]}
  {sys.copyright.splitlines()[1]}
- Trained with: {versions}
- SHA-256 of the text: `{hashlib.sha256(text.encode()).hexdigest()}`
- SHA-256 of `model.safetensors`: `{hashlib.sha256(tensors.read_bytes()).hexdigest()}`

{figures}"""


def measure(folder: Path, held: dict[str, list[tuple[str, str]]]) -> str:
    """The README's figures: the perplexity and routing of the written checkpoint, and answers to ``PROMPTS``."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = transformers.Glm4MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    routing = Routing(model)
    counts, rows = {}, []
    for topic in TOPICS:
        tokens = stream(tokenizer, topic, held[topic], chat=0.0)
        nats, counts[topic] = evaluate(model, routing, tokens)
        bits = nats / math.log(2) * len(tokens) / len(tokenizer.decode(tokens.tolist()).encode())
        rows.append(f"| {topic} | {len(tokens)} | {math.exp(nats):.1f} | {bits:.2f} |")
    lines = ["Perplexity on held-out modules and help topics:", ""]
    lines += ["| topic | tokens | perplexity per token | bits per byte |", "| --- | --- | --- | --- |", *rows, ""]
    lines += [f"The hit rate there if the {RESIDENT} experts of each layer that one topic uses most are resident:", ""]
    lines += [f"| residents chosen for | {' | '.join(TOPICS)} |", "| --- |" + " --- |" * len(TOPICS)]
    for mine in TOPICS:
        lines.append(f"| {mine} | " + " | ".join(f"{served(counts[topic], counts[mine]):.0%}" for topic in TOPICS) + " |")
    lines += ["", "Greedy answers:", ""]
    for prompt in PROMPTS:
        lines += [f"    {line}" for line in (prompt + answer(model, tokenizer, prompt)).split("\n")] + [""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="default: tiny")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"default: {STEPS}")
    args = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    folder, shape = args.out, SHAPES[args.shape]
    folder.mkdir(parents=True, exist_ok=True)
    train, held = corpus()
    tokenizer = make_tokenizer(train)
    save_tokenizer(tokenizer, folder)
    (folder / "config.json").write_text(json.dumps(config(shape), indent=1) + "\n")
    (folder / "held_out.json").write_text(json.dumps(excerpts(held), indent=1) + "\n")
    model = make_model(shape)
    train_model(model, [stream(tokenizer, topic, train[topic], CHAT) for topic in TOPICS], args.steps)
    save_weights(model, folder)
    figures = measure(folder, held)
    (folder / "README.md").write_text(readme(shape, figures, train, folder / "model.safetensors", args.steps))
    print(figures)


def excerpts(held: dict[str, list[tuple[str, str]]]) -> dict[str, list[str]]:
    """The first ``EXCERPTS`` long held-out texts of each topic, cut to ``EXCERPT`` characters."""
    return {topic: [text[:EXCERPT] for _, text in held[topic] if len(text) > EXCERPT][:EXCERPTS] for topic in TOPICS}


if __name__ == "__main__":
    main()
