"""Prompt sources and splits."""

import gzip
import json
import os
from collections import Counter
from itertools import islice

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from ssd_train import prompts
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


FILES = {
    "prompts.txt": "a cat\n\n  \na dog, sitting\n",
    "windows.TXT": "\ufeffa cat\r\n\r\n  \r\na dog, sitting",
    "prompts[1].txt": "a cat\n\n\na dog, sitting\n",
    "prompts.jsonl": '{"text": "a cat", "id": 3}\n\n{"text": null}\n{"text": "a dog, sitting"}\n',
    "lines.json": '\ufeff{"text": "a cat"}\n{"text": ""}\n{"text": " "}\n{"text": "a dog, sitting"}',
    "list.json": '[{"text": "a cat"}, {"text": ""}, {"text": null}, {"text": "a dog, sitting"}]',
    "prompts.csv": 'id,text\n1,a cat\n2,\n3," "\n4,"a dog, sitting"\n',
    "prompts.tsv": "text\tid\r\na cat\t1\r\n\t2\r\n \t3\r\na dog, sitting\t4\r\n",
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name, content", FILES.items(), ids=FILES.keys())
def test_a_file_of_prompts(tmp_path, monkeypatch, name, content, packed):
    """Of every kind: rows without a prompt keep their numbers; no other file is read, nothing is cached or guessed."""
    monkeypatch.setenv("HF_HOME", "/dev/null/nowhere")
    (tmp_path / "prompts1.txt").write_text("another file\n")
    path = tmp_path / (name + ".GZ" * packed)
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    assert list(DatasetPrompts(str(path))) == [Prompt(0, "a cat"), Prompt(3, "a dog, sitting")]
    changed = path.stat()
    content = content.replace("cat", "cow")
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    os.utime(path, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    assert next(iter(DatasetPrompts(str(path)))).text == "a cow"


def test_a_parquet_file_of_prompts(tmp_path):
    parquet.write_table(pyarrow.table({"text": ["a cat", None, "", "a dog"]}), tmp_path / "prompts.parquet")
    assert list(DatasetPrompts(str(tmp_path / "prompts.parquet"))) == [Prompt(0, "a cat"), Prompt(3, "a dog")]


LONG = '{"text": "%s"}\n' % ("word " * 2001)
REFUSED = [
    (
        "big.jsonl",
        '{"text": "a cat"}\n' * 700_000 + '{"text": 12}\n',
        r"line 700001: column 'text' holds 12; expected",
    ),
    ("bad.jsonl", '{"text": "a cat"}\n{"text": "a do', r"bad.jsonl, line 2: no JSON \(.*\); set model"),
    ("deep.jsonl", "[" * 100_000, r"deep.jsonl, line 1: no JSON"),
    ("number.json", "12\n", r"number.json, line 1: '12' is no object; expected one with a column of prompts"),
    ("list.json", '[{"text": "a cat"}, 3]', r"list.json, object 2: '3' is no object"),
    (
        "other.jsonl",
        '{"caption": "a cat", "id": 1}',
        r"other.jsonl, line 1: there are columns \['caption', 'id'\], ",
    ),
    (
        "other.csv",
        "caption,id\na cat,1\n",
        r"other.csv, line 2: there are columns \['caption', 'id'\], not 'text'",
    ),
    ("wide.csv", "text\na cat,and a dog\n", r"wide.csv, line 2: more fields than the header's \['text'\]"),
    ("long.jsonl", LONG, r"long.jsonl, line 1: a prompt of 10005 characters; expected at most 10000"),
    ("empty.txt", "", r"empty.txt is empty; expected a prompt a line"),
    ("latin.txt", b"a caf\xe9\n", r"latin.txt is not UTF-8 \(.*0xe9.*\); save it as such"),
    (
        "cut.txt.gz",
        gzip.compress(b"a cat\n" * 9999)[:60],
        r"cut.txt.gz cannot be read to its end \(.*\); make",
    ),
    ("bomb.txt.gz", gzip.compress(bytes(2**24 + 9)), r"bomb.txt.gz, line 1: more than 16777216 characters; expected a"),
    ("bomb.json.gz", gzip.compress(b"[" + bytes(9999)), r"bomb.json.gz, the list: more than 5000 characters"),
    ("no.txt.gz", b"a cat\n", r"no.txt.gz cannot be read to its end \(.*gzipped.*\); make"),
    ("no.parquet", b"a cat\n", r"no.parquet cannot be read to its end \(row 1: .*\); make"),
    (
        "prompts.docx",
        b"a cat\n",
        r"prompts.docx is a file of another kind than .txt, .jsonl, .* set model",
    ),
]


@pytest.mark.parametrize("name, content, message", REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_file_that_is_no_list_of_prompts_is_refused_by_its_line(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(prompts, "LONGEST_LIST", 5000)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        list(DatasetPrompts(str(tmp_path / name)))


@pytest.mark.parametrize("path, message", [
    ("", "model.prompts.path is empty; set model.prompts.path to a file of your own: prompts.txt with"),
    ("nowhere.jsonl", r"no prompts to be had from nowhere.jsonl: there is no such file; set model.prompts.path"),
])  # fmt: skip
def test_no_file_is_said(path, message):
    with pytest.raises(ValueError, match=message):
        list(DatasetPrompts(path))


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


def test_a_data_set_that_is_not_to_be_had_says_what_to_do(monkeypatch):
    """Offline, as all tests are."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    name = "vivym/midjourney-prompts"
    with pytest.raises(ValueError, match=rf"no prompts to be had from {name} \(.*{name}.*HF_HOME.* Or set"):
        list(DatasetPrompts(name, column="prompt"))


def test_images_come_with_their_captions(tmp_path):
    """Paths beside the list, loaded when asked for; a row without a picture is left out like one without a prompt."""
    picture = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    Image.fromarray(picture).save(tmp_path / "0.png")
    path = tmp_path / "prompts.jsonl"
    rows = [("a cat", "0.png"), ("a cow", None), ("a dog", "none.png"), ("a hen", ""), (None, "0.png")]
    path.write_text("".join(json.dumps({"text": text, "image": image}) + "\n" for text, image in rows))
    prompts = list(DatasetPrompts(str(path), image_column="image"))
    assert [(p.index, p.text) for p in prompts] == [(0, "a cat"), (2, "a dog")]
    assert np.array_equal(prompts[0].image(), picture)
    with pytest.raises(ValueError, match=r"prompts.jsonl, line 3: the picture \S+/none.png cannot be read \(No such"):
        prompts[1].image()
    with pytest.raises(ValueError, match=r"line 1: .*, not 'photo'; set model.prompts.column or"):
        list(DatasetPrompts(str(path), image_column="photo"))


def test_a_text_file_needs_no_column(tmp_path):
    """The real models' yamls name the column of a data set; another path alone must do for a text file."""
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    prompts = DatasetPrompts(str(tmp_path / "prompts.txt"), column="prompt")
    assert [p.text for p in prompts] == ["a cat", "a dog"]
