"""Suites whose pictures lie side by side with captions.jsonl: PartiPrompts (Yu et al., arXiv 2206.10789), MS-COCO (Lin
et al., arXiv 1405.0312) and prompts of one's own."""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssd_train.draws import sample_seed
from ssd_train.evaluation.suites.base import Suite, SuitePrompt, column, write_jsonl
from ssd_train.prompts import DatasetPrompts


@dataclass
class Captions(Suite):
    """a file of prompts: .txt, .jsonl, .csv, .tsv or .parquet"""

    column: str = "text"

    def rows(self) -> Iterator[SuitePrompt]:
        for prompt in DatasetPrompts(self.path, self.column):
            yield SuitePrompt(prompt.index, f"{prompt.index:05d}", prompt.text)

    def files(self, folder: Path, prompt: SuitePrompt) -> list[Path]:
        n = self.images_per_prompt
        return [folder / (f"{prompt.id}_{number}.png" if n > 1 else f"{prompt.id}.png") for number in range(n)]

    def finish(self, folder: Path, prompts: Sequence[SuitePrompt]) -> None:
        write_jsonl(
            folder / "captions.jsonl",
            (
                prompt.metadata | {"file_name": path.name, "prompt": prompt.text}
                for prompt in prompts
                for path in self.files(folder, prompt)
            ),
        )


@dataclass
class Parti(Captions):
    """PartiPrompts.tsv: columns Prompt, Category, Challenge and Note"""

    column: str = "Prompt"

    def rows(self) -> Iterator[SuitePrompt]:
        # Quotation marks in this file are the prompts' own.
        with open(self.path, encoding="utf-8-sig", newline="") as file:
            lines = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            for row, fields in enumerate(lines):
                place = f"line {lines.line_num}"
                if None in fields:
                    raise ValueError(f"{self.path}, {place}: more fields than the header's {lines.fieldnames}")
                yield SuitePrompt(row, f"{row:05d}", column(self.path, place, fields, self.column), fields)


@dataclass
class Coco(Captions):
    """annotations/captions_val2014.json, or another year's, of MS-COCO"""

    caption_seed: int | None = None  # an image's caption: the one of the lowest id, or drawn by this seed

    def rows(self) -> Iterator[SuitePrompt]:
        try:
            content = json.loads(Path(self.path).read_text("utf-8"))
            images = [(image["id"], image["file_name"]) for image in content["images"]]
            captions: dict[int, list[tuple[int, str]]] = {image: [] for image, _ in images}
            for note in content["annotations"]:
                captions[note["image_id"]].append((note["id"], note["caption"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path} is no COCO caption file ({error!r}); expected images with id and file_name, and "
                "annotations with image_id, id and caption"
            ) from error
        for row, (image, name) in enumerate(images):
            found = sorted(captions[image])
            pick = 0 if self.caption_seed is None else sample_seed(self.caption_seed, row) % max(1, len(found))
            id, text = found[pick] if found else (None, "")
            yield SuitePrompt(row, Path(name).stem, text.strip(), {"image_id": image, "caption_id": id})
