"""python -m ssd_train.draw "two red squares" "a blue circle" --out drawn

Pictures from prompts, one PNG each, named by number and prompt, with prompt, seed, decoder, passes and versions in its
text chunks. The same prompt and seed give the same picture alone, in a batch and in the decode stage.
"""

import argparse
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from ssd_train import config


def parser() -> argparse.ArgumentParser:
    build = argparse.ArgumentParser("python -m ssd_train.draw", description="Draws pictures from prompts.")
    build.add_argument("prompts", nargs="*", metavar="PROMPT", help="what to draw; - reads lines from standard input")
    build.add_argument(
        "--prompts", dest="file", metavar="FILE", help="a file of prompts, in any format of cache prompts"
    )
    build.add_argument("--out", type=Path, default=Path("drawn"), help="folder of the pictures (default: drawn)")
    build.add_argument("--model", default="tiny", help=f"one of {', '.join(config.choices('model'))}")
    build.add_argument("--decoder", help="name or yaml of a decoder (default: the best that the heads allow)")
    build.add_argument("--compare", action="append", default=[], metavar="DECODER",
                       help="draw with this one too, and leave a contact sheet; may be repeated")  # fmt: skip
    build.add_argument("--heads", help="folder or hub id (default: those that ship with the model)")
    build.add_argument("--seed", type=int, default=0)
    build.add_argument("--count", type=int, default=1, help="pictures a prompt, with seeds from --seed on")
    build.add_argument("--batch", type=int, default=1, help="prompts at a time: more a minute, the first one later")
    build.add_argument("--guidance", type=float)
    build.add_argument("--temperature", type=float)
    build.add_argument("--grid", type=int, nargs=2, metavar=("ROWS", "COLUMNS"))
    build.add_argument("--device", default="auto")
    build.add_argument("--dtype", help="of the backbone, for example bfloat16")
    build.add_argument("--force", action="store_true", help="overwrite pictures that are there")
    return build


def main(arguments: Sequence[str] | None = None) -> None:
    """Exits with 2 and one line for whatever is wrong, with 130 where it was stopped; finished pictures stay."""
    args = parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        _draw(args)
    except (ValueError, OSError, RuntimeError) as error:
        _say(f"error: {' '.join(str(error).split())}")
        sys.exit(2)
    except KeyboardInterrupt:
        _say(f"stopped; what was finished is in {args.out}")
        sys.exit(130)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _prompts(args: argparse.Namespace) -> list[str]:
    """From the command line, standard input and a file, in this order."""
    texts = []
    for text in args.prompts:
        texts += [line.strip() for line in sys.stdin if line.strip()] if text == "-" else [text]
    if args.file:
        from ssd_train.prompts import DatasetPrompts

        texts += [prompt.text for prompt in DatasetPrompts(args.file)]
    if not texts:
        raise ValueError("nothing to draw; expected prompts, --prompts FILE, or - for standard input")
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise ValueError(f"prompt {number} is empty; expected words")
    return texts


def _names(texts: Sequence[str], seeds: Sequence[int], decoders: Sequence[str], count: int) -> list[list[str]]:
    """Of each picture a file name a decoder, without suffix."""
    names = []
    for i, (text, seed) in enumerate(zip(texts, seeds, strict=True)):
        words = re.sub(r"[^\w]+", "-", text.lower()).strip("-")[:60].strip("-") or "picture"
        name = f"{i // count + 1:03d}-{words}" + (f"-seed-{seed}" if count > 1 else "")
        names.append([name + (f"-{Path(d).stem}" if len(decoders) > 1 else "") for d in decoders])
    return names


def _draw(args: argparse.Namespace) -> None:
    texts = _prompts(args)
    for name, value, least in ("seed", args.seed, 0), ("count", args.count, 1), ("batch", args.batch, 1):
        if value < least:
            raise ValueError(f"--{name} is {value}; expected at least {least}")
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.out.is_dir():
        raise ValueError(f"{args.out} is no folder")
    settings = {
        "model.sampling.guidance": args.guidance, "model.sampling.temperature": args.temperature,
        "model.backbone.dtype": args.dtype, "+model.backbone.grid": args.grid and f"[{args.grid[0]},{args.grid[1]}]",
        "device": args.device, "decode.batch_size": args.batch,
    }  # fmt: skip
    from transformers.utils.logging import disable_progress_bar

    from ssd_train.runs.painter import Painter

    disable_progress_bar()  # of loading, which takes a moment
    painter = Painter(
        args.model, args.heads, [f"{key}={value}" for key, value in settings.items() if value is not None]
    )
    decoders = list(dict.fromkeys([*args.compare, args.decoder or painter.best()]))
    for decoder in decoders:
        painter.decoder(decoder)
    seeds = [args.seed + i for _ in texts for i in range(args.count)]
    texts = [text for text in texts for _ in range(args.count)]
    painter.backbone.encode_prompts(texts)
    names = _names(texts, seeds, decoders, args.count)
    if len({Path(decoder).stem for decoder in decoders}) < len(decoders):
        raise ValueError(f"two of {', '.join(decoders)} would name their pictures alike; rename a yaml")
    files = [args.out / f"{name}{suffix}" for row in names for name in row for suffix in (".png", ".npy")]
    files += [args.out / "sheet.png"] if len(decoders) > 1 else []
    there = [file for file in files if file.exists()]
    if there and not args.force:
        raise ValueError(f"{there[0]} is there already; expected another --out, or --force to overwrite it")
    shown = _pictures(args, painter, texts, seeds, decoders, names)
    if len(decoders) > 1 and shown[decoders[0]]:
        import numpy as np
        import torch

        from ssd_train.evaluation.plots import image_grid

        columns = {d: torch.from_numpy(np.stack([np.asarray(image) for image in shown[d]])) for d in decoders}
        image_grid(columns, texts, args.out / "sheet.png")
        print(args.out / "sheet.png")


def _pictures(args: argparse.Namespace, painter, texts, seeds, decoders, names) -> dict[str, list]:
    """Writes them batch by batch, with a line each; returns the images by decoder."""
    from tqdm import tqdm

    shown: dict[str, list] = {decoder: [] for decoder in decoders}
    with tqdm(total=len(texts) * len(decoders), desc="drawing", unit="picture", disable=None) as bar:
        for start in range(0, len(texts), args.batch):
            batch = slice(start, start + args.batch)
            seconds: dict[str, float] = {}
            for column, decoder in enumerate(decoders):
                began = perf_counter()
                decoded = painter.decode(texts[batch], decoder, seeds[batch])
                decoded.tokens.cpu()
                seconds[decoder] = (perf_counter() - began) / len(texts[batch])
                try:
                    images = painter.pictures(decoded.tokens)
                except FileNotFoundError as error:
                    images = None
                    tqdm.write(f"no pixels, so tokens are saved: {error}", sys.stderr)
                for i, passes in enumerate(decoded.trace.passes):
                    file = args.out / names[start + i][column]
                    about = {"prompt": texts[start + i], "seed": seeds[start + i], "decoder": decoder, "passes": passes}
                    if images is None:
                        file = _save_tokens(file, decoded.tokens[i])
                    else:
                        file = _save_picture(file, images[i], about | {"model": args.model})
                        shown[decoder].append(images[i])
                    faster = (
                        f", {seconds['ar'] / seconds[decoder]:.2f}x AR" if "ar" in seconds and decoder != "ar" else ""
                    )
                    tqdm.write(f"{file}: {passes} passes, {seconds[decoder]:.2f} s{faster}", sys.stdout)
                    bar.update()
    return shown


def _save_picture(file: Path, image, about: dict) -> Path:
    import io

    from PIL.PngImagePlugin import PngInfo

    from ssd_train.evaluation.report import versions
    from ssd_train.processes.files import write_atomically

    chunks = PngInfo()
    for key, value in (about | {"versions": json.dumps(versions())}).items():
        chunks.add_itxt(key, str(value))
    data = io.BytesIO()
    image.save(data, "PNG", pnginfo=chunks)
    file = file.with_name(f"{file.name}.png")
    write_atomically(file, data.getvalue())
    return file


def _save_tokens(file: Path, tokens) -> Path:
    import io

    import numpy as np

    from ssd_train.processes.files import write_atomically

    data = io.BytesIO()
    np.save(data, tokens.cpu().numpy(), allow_pickle=False)
    file = file.with_name(f"{file.name}.npy")
    write_atomically(file, data.getvalue())
    return file


if __name__ == "__main__":
    main()
