"""Official files and their odd rows, layouts as the official scorers walk them, and scores read back."""

import json
import os
import re

import numpy as np
import pytest
from composing import composed
from hydra.utils import instantiate
from PIL import Image
from suite_files import FOREIGN, QUOTED, SUITES, TABBED, official, parti, written

from ssd_train.evaluation.metrics import wilson
from ssd_train.evaluation.suites.published import published


def suite(name, path, *overrides):
    return instantiate(composed("+model=tiny", f"+suite={name}", f"suite.path={path}", *overrides).suite)


@pytest.mark.parametrize(
    "name, rows",
    [
        ("geneval", [(0, "00000", QUOTED), (2, "00002", TABBED), (3, "00003", QUOTED), (4, "00004", FOREIGN)]),
        ("dpg_bench", [
            (0, "10", QUOTED), (2, "COCOval2014000000000042", TABBED), (3, "partiprompts9", FOREIGN),
            (4, "whoops1", QUOTED),
        ]),
        ("parti", [
            (0, "00000", f'"{QUOTED}'), (2, "00002", "bond"), (3, "00003", f'"{QUOTED}'), (4, "00004", FOREIGN),
        ]),
        ("coco", [(row, f"COCO_val2014_{id:012d}", text) for row, id, text in (
            (0, 7, QUOTED), (2, 9, TABBED), (3, 1, QUOTED), (4, 2, FOREIGN)
        )]),
        ("prompts", [(0, "00000", QUOTED), (2, "00002", TABBED), (3, "00003", QUOTED), (4, "00004", FOREIGN)]),
    ],
)  # fmt: skip
def test_every_prompt_is_there_as_the_file_has_it(name, rows, tmp_path):
    """A row without a prompt is left out, and moves no other; rows with the same prompt are different ones."""
    prompts, blank = suite(name, SUITES[name](tmp_path)).prompts()
    assert [(p.row, p.id, p.text) for p in prompts] == rows
    assert blank == (0 if name == "prompts" else 1)  # that source counts its blank rows itself
    seeds = [p.seed(0, number) for p in prompts for number in range(4)]
    assert len({*seeds, *(prompts[0].seed(1, number) for number in range(4))}) == 4 * len(prompts) + 4


@pytest.mark.parametrize("name, count, row, text", [
    ("geneval", 553, 552, "a photo of a blue pizza and a yellow baseball glove"),
    ("dpg_bench", 1065, None, None),
    ("parti", 1632, 0, "bond"),
])  # fmt: skip
def test_the_official_files(name, count, row, text):
    if (path := official(name)) is None:
        pytest.skip("set SSD_BENCHMARKS to a folder with geneval/, dpg_bench/ and parti/")
    prompts, blank = suite(name, path).prompts()
    assert (len(prompts), blank, len({p.id for p in prompts})) == (count, 0, count)
    assert row is None or prompts[row].text == text
    assert not any(re.search(r"[\r\n\t]", p.text) for p in prompts)


def test_coco_s_caption_is_the_lowest_id_s_or_drawn(tmp_path):
    path = SUITES["coco"](tmp_path)
    texts = {suite("coco", path, f"suite.caption_seed={seed}").prompts()[0][0].text for seed in range(8)}
    assert texts == {QUOTED, "late"}


@pytest.mark.parametrize("name, content, message", [
    ("geneval", '{"tag": "colors"}', r"line 1: there are columns \['tag'\], not 'prompt'"),
    ("geneval", '{"prompt": "a dog"}', r"line 1: there are columns \['prompt'\], not 'tag'"),
    ("geneval", '{"tag": "colors", "prompt": 3}', "line 1: column 'prompt' holds 3; expected text"),
    ("geneval", "a dog", "line 1: no JSON .*expected evaluation_metadata.jsonl of GenEval"),
    ("geneval", "\n", "holds no prompts; expected evaluation_metadata.jsonl"),
    ("dpg_bench", "a dog", "holds no prompts; expected the folder dpg_bench/prompts"),
    ("parti", "Text\tCategory\na\tb", r"line 2: there are columns \['Category', 'Text'\], not 'Prompt'"),
    ("parti", "Prompt\tCategory\na\tb\tc", "line 2: more fields than the header's"),
    ("parti", "Prompt\n\udcff", "is not UTF-8"),
    ("coco", '{"images": []}', "no COCO caption file .KeyError.'annotations'"),
    ("coco", '{"images": [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "b/a.png"}], "annotations": ['
     '{"image_id": 1, "id": 1, "caption": "x"}, {"image_id": 2, "id": 2, "caption": "x"}]}',
     "rows 1 and 2 are both 'a'"),
    ("prompts", None, r"there is no such file; expected a file of prompts"),
])  # fmt: skip
def test_a_file_that_is_another_is_refused_by_row(name, content, message, tmp_path):
    path = tmp_path / {"geneval": "a.jsonl", "prompts": "a.txt"}.get(name, "a")
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as caught:
        suite(name, path).prompts()
    assert "model.prompts" not in str(caught.value)


def pictures(n, height=6, width=6):
    return np.random.default_rng(n).integers(0, 256, (n, height, width, 3), dtype=np.uint8)


def geneval_walk(folder):
    """What evaluation/evaluate_images.py of GenEval finds: (prompt, {image name: picture}) a folder."""
    found = {}
    for name in os.listdir(folder):
        if not (folder / name).is_dir() or not name.isdigit():
            continue
        with open(folder / name / "metadata.jsonl") as file:
            metadata = json.load(file)
        samples = [f for f in os.listdir(folder / name / "samples") if re.match(r"\d+\.png", f)]
        found[name] = metadata, {f: np.asarray(Image.open(folder / name / "samples" / f)) for f in samples}
    return found


def dpg_walk(folder, resolution, count):
    """What compute_dpg_bench.py cuts out of each file of the folder: top left, top right, bottom left, bottom right."""
    corners = [(0, 0), (resolution, 0), (0, resolution), (resolution, resolution)][:count]
    return {
        name.split(".")[0]: [
            np.asarray(Image.open(folder / name).crop((x, y, x + resolution, y + resolution))) for x, y in corners
        ]
        for name in os.listdir(folder)
    }


def test_geneval_s_scorer_finds_every_image_and_its_metadata_unchanged(tmp_path):
    geneval = suite("geneval", SUITES["geneval"](tmp_path))
    prompts, _ = geneval.prompts()
    for prompt in prompts:
        geneval.save(tmp_path / "ar", prompt, pictures(4) + prompt.row)
    geneval.finish(tmp_path / "ar", prompts)
    lines = [json.loads(line) for line in (tmp_path / "evaluation_metadata.jsonl").read_text().splitlines()]
    found = geneval_walk(tmp_path / "ar")
    assert found.keys() == {p.id for p in prompts}
    for prompt in prompts:
        metadata, images = found[prompt.id]
        assert metadata == lines[prompt.row]
        assert sorted(images) == ["0000.png", "0001.png", "0002.png", "0003.png"]
        assert all((images[f"{i:04d}.png"] == picture).all() for i, picture in enumerate(pictures(4) + prompt.row))


@pytest.mark.parametrize("count, shape", [(4, (6, 6)), (4, (4, 6)), (4, (6, 4)), (3, (6, 6)), (1, (6, 6))])
def test_dpg_bench_s_scorer_cuts_each_image_out_of_the_grid(count, shape, tmp_path):
    """At the resolution that the command names; beside a picture that is not square there is black."""
    dpg = suite("dpg_bench", SUITES["dpg_bench"](tmp_path), f"suite.images_per_prompt={count}")
    prompt = dpg.prompts()[0][1]
    dpg.save(tmp_path / "ar", prompt, pictures(count, *shape))
    assert "--resolution 6 " in dpg.command(tmp_path / "ar", tmp_path / "ar.txt", shape)
    cells = dpg_walk(tmp_path / "ar", 6, count)
    assert cells.keys() == {prompt.id}
    for cell, picture in zip(cells[prompt.id], pictures(count, *shape), strict=True):
        assert (cell[: shape[0], : shape[1]] == picture).all()
        assert not cell[shape[0] :].any()
        assert not cell[:, shape[1] :].any()
    assert (dpg.load(tmp_path / "ar", prompt, shape) == pictures(count, *shape)).all()


def test_a_grid_holds_four():
    with pytest.raises(Exception, match=r"suite.images_per_prompt is 5; a 2 x 2 grid holds 1 to 4"):
        suite("dpg_bench", "unused", "suite.images_per_prompt=5")


@pytest.mark.parametrize("count", [1, 2])
def test_captions_name_every_picture(count, tmp_path):
    captions = suite("parti", parti(tmp_path), f"suite.images_per_prompt={count}")
    prompts, _ = captions.prompts()
    for prompt in prompts:
        captions.save(tmp_path / "ar", prompt, pictures(count))
    captions.finish(tmp_path / "ar", prompts)
    rows = [json.loads(line) for line in (tmp_path / "ar/captions.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [p.text for p in prompts for _ in range(count)]
    assert rows[0]["Category"] == "Abstract"
    assert {row["file_name"] for row in rows} == {path.name for path in (tmp_path / "ar").glob("*.png")}
    assert len(rows) == len({row["file_name"] for row in rows}) == 4 * count


# -- scores -------------------------------------------------------------------------------------------------------


def geneval_results(path, prompts, wrong=(), drop=0, **changes):
    """As GenEval's scorer writes them."""
    rows = [
        {"filename": f"/x/ar/{p.id}/samples/{i:04d}.png", "tag": p.metadata["tag"], "prompt": p.text,
         "correct": (p.row, i) not in wrong, "reason": "", "metadata": json.dumps(p.metadata)} | changes
        for p in prompts for i in range(4)
    ]  # fmt: skip
    return written(path, "".join(json.dumps(row) + "\n" for row in rows[drop:]))


def test_geneval_s_scores_are_by_tag_and_overall_the_mean_of_tags(tmp_path):
    geneval = suite("geneval", SUITES["geneval"](tmp_path))
    prompts, _ = geneval.prompts()
    results = geneval_results(tmp_path / "ar.jsonl", prompts, wrong={(0, 0), (3, 1), (2, 2)})
    scores = geneval.scores(results, prompts)
    assert list(scores) == ["overall", "counting", "position", "colors"]
    assert scores["counting"] == wilson(6, 8)
    assert scores["position"] == wilson(3, 4)
    assert scores["overall"][0] == pytest.approx((6 / 8 + 3 / 4 + 1) / 3)
    assert scores["overall"][1] < scores["overall"][0] < scores["overall"][2] <= 1
    assert geneval.scores(results, prompts[:1])["overall"] == pytest.approx(wilson(3, 4))  # of a smaller suite.limit


@pytest.mark.parametrize("changes, message", [
    ({"drop": 3}, "is of 13 images, and there are 16; run the scorer again"),
    ({"tag": "colors"}, "line 1: 00000 is 'colors', True; expected 'counting', true or false"),
    ({"correct": "yes"}, "line 1: 00000 is 'counting', 'yes'"),
    ({"filename": "x.png"}, "line 1: expected filename, tag and correct"),
])  # fmt: skip
def test_geneval_results_of_something_else_are_refused(changes, message, tmp_path):
    geneval = suite("geneval", SUITES["geneval"](tmp_path))
    prompts, _ = geneval.prompts()
    with pytest.raises(ValueError, match=message):
        geneval.scores(geneval_results(tmp_path / "ar.jsonl", prompts, **changes), prompts)


DPG_SUMMARY = """Model: ar
L1 category scores:
\tentity: 75.0
\tattribute: 62.5
L2 category scores:
\tentity - whole: 80.0
Image path: /x/ar
Save results to: /x/ar.txt
DPG-Bench score: 60.0
"""


def test_dpg_bench_s_scores_are_its_own_lines_and_summary(tmp_path):
    dpg = suite("dpg_bench", SUITES["dpg_bench"](tmp_path))
    prompts, _ = dpg.prompts()
    values = [0.5, 1.0, 0.25, 0.65]
    lines = [f"/x/ar/{p.id}.png, {v}, {v}, {v}, {v}, {v}\n" for p, v in zip(prompts, values, strict=True)]
    scores = dpg.scores(written(tmp_path / "ar.txt", "".join(lines) + DPG_SUMMARY), prompts)
    half = 1.96 * np.std(values, ddof=1) / 2
    assert scores["overall"] == pytest.approx((0.6, 0.6 - half, 0.6 + half))
    assert scores["entity"] == (0.75, None, None)
    assert list(scores) == ["overall", "entity", "attribute"]
    with pytest.raises(ValueError, match="lacks 1 of 4 pictures, whoops1 first"):
        dpg.scores(written(tmp_path / "ar.txt", "".join(lines[:3]) + DPG_SUMMARY), prompts)


def test_published_rows_are_as_their_authors_corrected_them():
    rows = {(r.model.split("-")[0], r.method): r for r in published("geneval") if r.suite}
    for model, ar, ssd, speedup in (
        ("Janus", 0.77, 0.73, 5.70),
        ("Lumina", 0.50, 0.46, 7.35),
        ("Emu3", 0.45, 0.40, 11.03),
    ):
        assert rows[model, "AR"].scores == {"overall": ar}
        assert (rows[model, "SSD"].scores, rows[model, "SSD"].wall_speedup) == ({"overall": ssd}, speedup)
    assert all(row.source.startswith("arXiv ") for row in published("dpg_bench"))
