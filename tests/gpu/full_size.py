"""Every family at full size with random bfloat16 weights on a CUDA card: decodes a few rows with AR and with SSD, whose
repairs rewind the KV cache, checks that blocks agree with single tokens, and prints times, memory and how far they are
from what the card's memory allows. A few minutes:

    python tests/gpu/full_size.py

``--small`` does the same with small float32 models on the CPU, which tries the script itself.
"""

import argparse
import gc
import sys
import time
from dataclasses import asdict, dataclass

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn

from ssd_train import config
from ssd_train.backbones.base import Backbone, PromptBatch
from ssd_train.backbones.kv_cache import Slots
from ssd_train.backbones.sketches import sketch
from ssd_train.decoding.drafters.heads import HeadDrafter
from ssd_train.decoding.engine import Decoded, Decoder
from ssd_train.decoding.rules.strict import Strict
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.decoding.schedules.rows import Rows
from ssd_train.distributions import Sampling
from ssd_train.grid import Grid
from ssd_train.heads.predictors import Heads, HeadSpec
from ssd_train.runs import plan

FULL = [["+model=janus_pro_7b"], ["+model=lumina"], ["+model=emu3"]]
SMALL = [[f"+experiment=smoke_{family}"] for family in ("janus", "lumina", "emu3")]
ROWS = 4
PROMPT = "a lighthouse on a cliff above a stormy sea, oil on canvas"


@dataclass
class Result:
    """Times in ms and memory in GB; errors are relative to the norm of the states."""

    model: str
    parameters: float  # 1e9
    build_s: float
    ar_ms: float  # a pass
    ssd_ms: float
    passes: str  # AR's and SSD's
    ratio: float  # of an SSD pass to an AR pass
    floor_ms: float  # to read the weights of a pass once
    over_floor: float  # how many times that an AR pass takes
    peak_gb: float
    planned_gb: float
    block_error: float  # AR's states, token by token, against one block
    rewind_error: float  # SSD's states, last fed after repairs, against one block
    stale_error: float  # control: the same with a row that was not fed again after a repair


def run(overrides: list[str], device: str) -> Result:
    with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        cfg = compose("config", overrides)
    start = time.perf_counter()
    backbone = sketch(cfg.model, device)
    settle(device)
    build = time.perf_counter() - start
    backbone.grid = Grid(ROWS, backbone.grid.width, backbone.grid.end_of_line)
    sampling = Sampling(**cfg.model.sampling)
    prompts = backbone.encode_prompts([PROMPT])
    decoders = {
        "ar": Decoder(Autoregressive()).bind(backbone),
        "ssd": Decoder(Rows(rounds=2), HeadDrafter(), Strict()).bind(backbone, random_heads(backbone)),
    }
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # without that of building
    decoded, milliseconds = {}, {}
    for name, decoder in decoders.items():
        for _ in range(2):  # the first one warms up
            decoded[name] = decoder(backbone, prompts, [0], sampling, timed=True)
        trace = decoded[name].trace
        milliseconds[name] = 1e3 * trace.seconds["pass"] / (trace.passes[0] - 1)
    peak = torch.cuda.max_memory_allocated() / plan.GB if device == "cuda" else float("nan")
    floor = 1e3 * (size(backbone.decoder.layers) + size(backbone.output)) / bandwidth(device)
    sizes = plan.Sizes.of(backbone)
    planned = sizes.weights + size(decoders["ssd"].drafter.heads) + plan.drafting(sizes, 1)
    return Result(
        model=backbone.name,
        parameters=sizes.parameters / 1e9,
        build_s=build,
        ar_ms=milliseconds["ar"],
        ssd_ms=milliseconds["ssd"],
        passes=f"{decoded['ar'].trace.passes[0]}/{decoded['ssd'].trace.passes[0]}",
        ratio=milliseconds["ssd"] / milliseconds["ar"],
        floor_ms=floor,
        over_floor=milliseconds["ar"] / floor,
        peak_gb=peak,
        planned_gb=planned / plan.GB,
        block_error=error_of(backbone, prompts, decoded["ar"]),
        rewind_error=error_of(backbone, prompts, decoded["ssd"]),
        stale_error=stale_error(backbone, prompts, decoded["ar"].tokens.flatten(1)),
    )


def size(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def random_heads(backbone: Backbone) -> Heads:
    with torch.device(backbone.device):
        torch.manual_seed(0)
        heads = Heads(HeadSpec(backbone.width, backbone.vocabulary, k_vertical=1)).requires_grad_(False)
        for predictor in heads.predictors.values():
            predictor.w2.weight.normal_(std=0.02)
    return heads.eval()


def error_of(backbone: Backbone, prompts: PromptBatch, decoded: Decoded) -> float:
    return difference(decoded.hidden, backbone.teacher_force(prompts, decoded.tokens.flatten(1)))


@torch.inference_mode()
def stale_error(backbone: Backbone, prompts: PromptBatch, tokens: Tensor) -> float:
    """States of the second row when the first was fed with other tokens and its entries were left there."""
    width = backbone.grid.width
    start = prompts.ids.shape[-1]
    middle = start + backbone.grid.sequence_index(width)
    cache = backbone.new_cache(prompts)
    backbone.prefill(prompts, cache)
    other = (tokens + 1) % backbone.vocabulary
    first, second = (padded(backbone, row) for row in (other[:, :width], tokens[:, width : 2 * width]))
    backbone(first, Slots.span(start, middle, backbone.device), cache)
    hidden = backbone(second, Slots.span(middle, middle + second.shape[1], backbone.device), cache)
    right = backbone.teacher_force(prompts, tokens)
    return difference(hidden[:, : width - 1].view(2, 1, width - 1, -1), right[:, :, width + 1 : 2 * width])


def padded(backbone: Backbone, row: Tensor) -> Tensor:
    """Embeddings [R, n, d] of a row of tokens [B, w] and its end-of-line token."""
    if backbone.grid.end_of_line:
        row = torch.cat([row, row.new_full((len(row), 1), -1)], 1)
    return backbone.embed(row).repeat(2, 1, 1)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def bandwidth(device: str) -> float:
    """Bytes a second that memory gives, measured by copying."""
    source = torch.empty(2**30 if device == "cuda" else 2**26, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        settle(device)
        start = time.perf_counter()
        target.copy_(source)
        settle(device)
        best = min(best, time.perf_counter() - start)
    return 2 * len(source) / best


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run_all(small: bool) -> list[Result]:
    config.register()
    results = []
    for overrides in SMALL if small else FULL:
        results.append(run(overrides, "cpu" if small else "cuda"))
        gc.collect()
        if not small:
            torch.cuda.empty_cache()
    return results


def check(result: Result) -> list[str]:
    """What is wrong: rounding must stay far below what a forgotten repair does."""
    errors, stale = (result.block_error, result.rewind_error), result.stale_error
    if all(error < stale / 3 for error in errors):  # false for NaN, whichever of them it is
        return []
    block, rewind = (f"{error:.2g}" for error in errors)
    return [f"{result.model}: blocks differ by {block} and, after repairs, {rewind}; a stale row by {stale:.2g}"]


def table(results: list[Result]) -> str:
    rows = [list(asdict(results[0]))]
    rows += [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in asdict(r).values()] for r in results]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small models, on the CPU")
    small = parser.parse_args().small
    if not small and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device; --small runs on the CPU")
    results = run_all(small)
    print("the CPU" if small else torch.cuda.get_device_name(), f"torch {torch.__version__}", f"{ROWS} rows", sep=", ")
    print(table(results))
    if wrong := [line for result in results for line in check(result)]:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
