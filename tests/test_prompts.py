"""Prompt sources and splits."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from PIL import Image

from ssd_train.prompts import DatasetPrompts, Prompt, Split, split_of, take
from ssd_train.tiny.checker import category
from ssd_train.tiny.prompts import GrammarPrompts


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def test_a_split_depends_on_the_text_alone():
    """So a prompt that a source repeats, or another source also holds, is never in two splits. The values are pinned:
    were they to change, heads trained before could have seen today's validation prompts."""
    known = {"a red circle": Split.TRAIN, "a square": Split.VALIDATION, "a triangle": Split.TEST}
    assert {text: split_of(text) for text in known} == known
    assert split_of(" a square\n") is split_of("a square")


def test_splits_are_8_1_1():
    """Binomial: each share stays within 5 standard deviations with probability 1 - 2e-6."""
    count = 20_000
    counts = Counter(split_of(f"prompt {i}") for i in range(count))
    for split, share in {Split.TRAIN: 0.8, Split.VALIDATION: 0.1, Split.TEST: 0.1}.items():
        buckets = {Split.TRAIN: 204, Split.VALIDATION: 26, Split.TEST: 26}[split] / 256
        assert abs(counts[split] / count - buckets) < 5 * (buckets * (1 - buckets) / count) ** 0.5
        assert buckets == pytest.approx(share, abs=0.005)


def test_take_keeps_order_and_index():
    source = [Prompt(i, f"prompt {i}") for i in range(100)]
    chosen = take(source, [Split.TRAIN, Split.VALIDATION], 20)
    assert chosen == [p for p in source if split_of(p.text) is not Split.TEST][:20]


def test_take_from_too_short_a_source_says_what_to_do():
    source = [Prompt(i, f"prompt {i}") for i in range(100)]
    with pytest.raises(ValueError, match=r"50 test prompts wanted.*holds \d+; lower cache.samples or decode.prompts"):
        take(source, [Split.TEST], 50)


def test_take_gives_up_on_an_endless_source_without_the_split():
    def endless():
        while True:
            yield Prompt(0, "a red circle")

    with pytest.raises(ValueError, match="1 test prompts wanted"):
        take(endless(), [Split.TEST], 1, scan=1000)


def test_grammar_prompts_are_endless_and_always_the_same():
    first, second = (list(islice(iter(GrammarPrompts(seed=3)), 30)) for _ in range(2))
    assert [(p.index, p.text) for p in first] == [(p.index, p.text) for p in second]
    assert [p.index for p in first] == list(range(30))
    assert np.array_equal(first[7].image(), second[7].image())
    assert [p.text for p in islice(iter(GrammarPrompts(seed=4)), 30)] != [p.text for p in first]


def test_grammar_prompts_give_every_split_all_categories_alike():
    for split in Split:
        assert set(Counter(category(p.text) for p in take(GrammarPrompts(), [split], 60)).values()) == {10}


def test_a_text_file_holds_a_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n\n  \na dog, sitting\n")
    assert list(DatasetPrompts(str(path))) == [Prompt(0, "a cat"), Prompt(3, "a dog, sitting")]


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_jsonl_file_holds_an_object_a_line(tmp_path, suffix):
    path = tmp_path / f"prompts.{suffix}"
    path.write_text("".join(json.dumps({"caption": text, "id": 3}) + "\n" for text in ("a cat", "a dog")))
    assert [p.text for p in DatasetPrompts(str(path), column="caption")] == ["a cat", "a dog"]
    with pytest.raises(ValueError, match=r"has columns \['caption', 'id'\], not \['text'\]; set model.prompts.column"):
        list(DatasetPrompts(str(path)))


def test_a_datasets_source_is_read_by_its_split(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "train.csv").write_text("text\na cat\n")
    (folder / "test.csv").write_text("text\na dog\n")
    assert [p.text for p in DatasetPrompts(str(folder), split="test")] == ["a dog"]


def test_rows_without_a_prompt_are_left_out_and_keep_their_numbers(tmp_path, caplog):
    """Or a run on a large data set would end at its first empty row; and filling that in moves no other prompt."""
    path = tmp_path / "prompts.jsonl"
    texts = [None, "a cat", "", " \n", "a dog", None]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for _ in range(2):  # a run reads its prompts several times
        assert list(DatasetPrompts(str(path))) == [Prompt(1, "a cat"), Prompt(4, "a dog")]
    assert [record.message for record in caplog.records] == [
        f"{path}: 4 of the first 6 rows have no prompt and are left out"
    ]


def test_rows_behind_the_last_prompt_wanted_are_not_read(tmp_path, caplog):
    path = tmp_path / "prompts.txt"
    path.write_text("\na red circle\n\n")
    assert take(DatasetPrompts(str(path)), [Split.TRAIN], 1) == [Prompt(1, "a red circle")]
    assert "1 of the first 2 rows" in caplog.text


def test_a_row_that_holds_no_text_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": 1}\n{"text": 2}\n')
    with pytest.raises(ValueError, match=r"prompts.jsonl: row 0 has 1 in column 'text'; expected text"):
        list(DatasetPrompts(str(path)))


WHAT_TO_DO = r"Set model.prompts.path to a file of your own: prompts.txt .*HF_HOME"


@pytest.mark.parametrize("path, why", [
    ("vivym/midjourney-prompts", "vivym/midjourney-prompts"), ("nowhere.jsonl", "Unable to find"),
])  # fmt: skip
def test_a_source_that_is_not_to_be_had_says_what_to_do(path, why, monkeypatch):
    """Offline, as all tests are."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=rf"no prompts to be had from {path} \(.*{why}.*\)\. {WHAT_TO_DO}"):
        list(DatasetPrompts(path, column="prompt"))


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_an_empty_file_is_named(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=rf"{name} is empty; expected a prompt a line"):
        list(DatasetPrompts(str(tmp_path / name)))


def test_a_file_that_is_not_json_says_what_to_do(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("a cat\na dog\n")
    with pytest.raises(ValueError, match=rf"no prompts to be had from \S+prompts.jsonl \(.+\)\. {WHAT_TO_DO}"):
        list(DatasetPrompts(str(path)))


def test_images_come_with_their_captions(tmp_path):
    """Paths of image files in a JSONL file, loaded only when asked for."""
    picture = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    Image.fromarray(picture).save(tmp_path / "0.png")
    path = tmp_path / "prompts.jsonl"
    rows = [{"text": "a cat", "image": str(tmp_path / "0.png")}, {"text": "a dog", "image": str(tmp_path / "none.png")}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = list(DatasetPrompts(str(path), image_column="image"))
    assert np.array_equal(prompts[0].image(), picture)
    with pytest.raises(FileNotFoundError):
        prompts[1].image()
    with pytest.raises(ValueError, match=r"not \['photo'\]; set model.prompts.column or model.prompts.image_column"):
        list(DatasetPrompts(str(path), image_column="photo"))


def test_a_text_file_needs_no_column(tmp_path):
    """The real models' yamls name the column of a data set; another path alone must do for a text file."""
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    prompts = DatasetPrompts(str(tmp_path / "prompts.txt"), column="prompt")
    assert [p.text for p in prompts] == ["a cat", "a dog"]
