"""Phrases: learned as by a plain loop, matched as by a plain loop, and judged as worked out by hand."""

import json
import logging
import re
import shutil
import tarfile
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import micro
import numpy as np
import pytest
import safetensors.torch
import torch

from ssd_train import config
from ssd_train.cache.shards import CacheError
from ssd_train.decoding import phrases
from ssd_train.decoding.drafters.guess import Copy, Random
from ssd_train.decoding.drafters.heads import HeadDrafter
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.rules.constant import Amplify
from ssd_train.decoding.rules.grouped import Grouped
from ssd_train.decoding.rules.phrases import JointPhrases
from ssd_train.decoding.rules.strict import Strict
from ssd_train.decoding.schedules.chunks import Chunks
from ssd_train.decoding.schedules.jacobi import JacobiWindow
from ssd_train.decoding.schedules.parallel_jacobi import ParallelJacobi
from ssd_train.decoding.schedules.prefix import Prefix
from ssd_train.decoding.schedules.rows import Rows
from ssd_train.decoding.schedules.wave import Wave
from ssd_train.decoding.schedules.zipar import ZipAR
from ssd_train.decoding.state import Items, State
from ssd_train.distributions import Sampling, guided_probabilities
from ssd_train.grid import Grid
from ssd_train.heads.predictors import Heads, HeadSpec
from ssd_train.processes.files import read_json, write_json
from ssd_train.prompts import Split, split_of
from ssd_train.runs.decoders import configured_decoders
from ssd_train.stages import phrases as stage

# -- learning -----------------------------------------------------------------------------------------------------


def merged_by_a_loop(rows, merges):
    """Counts all pairs anew before each merge; of equally frequent pairs the one learned first, then the lower ids."""
    words = [[(int(token),) for token in row] for row in rows]
    order = {}
    learned = []
    while len(learned) < merges:
        counts = Counter(pair for word in words for pair in pairwise(word))
        best = min(counts, key=lambda pair: (-counts[pair], [order.get(s, s[0] - 1e6) for s in pair]), default=None)
        if best is None or counts[best] < 2:
            return learned
        whole = best[0] + best[1]
        if whole not in order:
            order[whole] = len(order)
            learned.append(list(whole))
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [whole]
                i += 1
    return learned


def test_phrases_by_hand():
    """(0, 0) stands three times, (1, 2) three times, then (1 2, 3) twice; (1 2, 4) once, which is no phrase."""
    rows = [np.array(row) for row in ([0, 0, 0, 0], [1, 2, 3], [1, 2, 3], [1, 2, 4])]
    assert phrases.learn(rows, vocabulary=5, merges=10) == [[0, 0], [1, 2], [1, 2, 3]]
    assert phrases.learn(rows, vocabulary=5, merges=2) == [[0, 0], [1, 2]]
    assert phrases.learn(rows, vocabulary=5, merges=10, least=3) == [[0, 0], [1, 2]]
    assert phrases.learn(rows[:0], vocabulary=5, merges=10) == []


@pytest.mark.parametrize("vocabulary, width", [(3, 6), (8, 16)])
def test_phrases_are_those_of_a_plain_loop(vocabulary, width):
    rng = np.random.default_rng(0)
    rows = np.minimum(rng.integers(0, vocabulary, (40, width)), rng.integers(0, vocabulary, (40, width)))
    learned = phrases.learn(rows, vocabulary, merges=30)
    assert learned == merged_by_a_loop(rows, 30)
    assert max(map(len, learned)) > 2


def test_ids_that_are_no_characters_of_a_text_and_too_many_of_them():
    """65534 and 65535 stand for U+FFFFE and U+FFFFF, which Unicode calls noncharacters."""
    rows = np.array([[65534, 65535, 0, 65534, 65535]])
    assert phrases.learn(rows, 65536, merges=1) == [[65534, 65535]]
    with pytest.raises(ValueError, match="the vocabulary has 131073 ids; expected at most 131072"):
        phrases.learn(rows, 131073, merges=1)


# -- a library on disk --------------------------------------------------------------------------------------------


def library(backbone, *runs):
    return phrases.Library(backbone.name, backbone.fingerprint, backbone.vocabulary, phrases=list(runs))


def test_a_library_comes_back_as_it_was(tmp_path):
    one = phrases.Library("tiny", "abc", 5, {"merges": 3}, {"phrases": 2}, [[0, 4], [1, 2, 3]])
    phrases.save(tmp_path / "new" / "phrases.json", one)
    assert phrases.load(tmp_path / "new" / "phrases.json") == one


MADE = {"backbone": "b", "fingerprint": "f", "vocabulary": 3}


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "phrases.json holds no JSON"),
        (json.dumps(MADE), "phrases.json is damaged: .*; run stages=.cache,phrases. to mend it"),
        (MADE | {"vocabulary": "3", "phrases": [[0, 1]]}, "phrases.json is not a phrase library that this version"),
        ({"backbone": "b", "fingerprint": "f"}, "missing 1 required positional argument: 'vocabulary'"),
        (MADE | {"phrases": [[0, 3]]}, r"ids from 0 to 2"),
        (MADE | {"phrases": [[0]]}, r"\[0\] is no phrase"),
        (MADE | {"phrases": [[0, 1]] * 100_001}, r"100001 phrases; expected at most 100000"),
        (MADE | {"phrases": [[0] * 1001]}, r"1 phrases; expected .* none of more than 1000 ids"),
    ],
    ids=range(8),
)
def test_a_file_that_is_no_library_is_refused(tmp_path, content, message):
    if isinstance(content, dict):
        write_json(tmp_path / "phrases.json", content, phrases.KIND)
    else:
        (tmp_path / "phrases.json").write_text(content)
    with pytest.raises(phrases.PhrasesError, match=message):
        phrases.load(tmp_path / "phrases.json")


# -- matching -----------------------------------------------------------------------------------------------------


def runs_by_a_loop(fits, follows, runs):
    """first [N]: at each free item the longest phrase that fits, then on behind it."""
    first, i = [], 0
    while i < len(fits):
        longest = 1
        for run in runs:
            reach = range(i, i + len(run))
            if (
                reach.stop <= len(fits)
                and all(follows[j] for j in reach[1:])
                and all(fits[j][token] for j, token in zip(reach, run, strict=True))
            ):
                longest = max(longest, len(run))
        first += [i] * longest
        i += longest
    return first


def first_items(fits, follows, runs):
    return phrases.first_of_run(phrases.match(fits, follows, phrases.table(runs))).tolist()


def one_hot(*tokens, vocabulary=5):
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocabulary).bool()


def test_runs_by_hand():
    """The longest phrase, from left to right, not over the end of a row; what the window cuts off is no match."""
    runs = [[1, 2], [1, 2, 3], [2, 3], [3, 4, 1, 2]]
    fits = one_hot(1, 2, 3, 1, 2, 4, 2, 3, 4, 1)
    follows = torch.tensor([False] + [True] * 9)
    assert phrases.match(fits, follows, phrases.table(runs)).tolist() == [3, 2, 0, 2, 0, 0, 2, 0, 0, 0]
    assert first_items(fits, follows, runs) == [0, 0, 0, 3, 3, 5, 6, 6, 8, 9]
    follows[2] = False
    assert first_items(fits, follows, runs) == [0, 0, 2, 3, 3, 5, 6, 6, 8, 9]
    assert first_items(fits[:1], follows[:1], runs) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_those_of_a_plain_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    items = seed + 1
    runs = [torch.randint(4, (2 + i % 6,), generator=generator).tolist() for i in range(12)]
    fits = torch.rand(items, 4, generator=generator) < 0.5
    follows = torch.rand(items, generator=generator) < 0.8
    assert first_items(fits, follows, runs) == runs_by_a_loop(fits, follows, runs)


def test_no_phrases_leave_every_item_alone():
    assert first_items(one_hot(1, 2, 3), torch.tensor([False, True, True]), []) == [0, 1, 2]


def test_coverage_by_hand():
    """Row 0: 1 2 | 3; row 1: the 1 at its end and the 2 that starts the next image do not meet."""
    images = torch.tensor([[[1, 2, 3], [3, 2, 1]], [[2, 1, 2], [0, 0, 0]]])
    assert phrases.coverage(images, phrases.table([[1, 2]]), 4) == pytest.approx(4 / 12)
    assert phrases.statistics([[1, 2], [0, 0, 0], [2, 1, 2]], images, 4) == {
        "phrases": 3, "by_length": {"2": 1, "3": 2}, "validation_samples": 2, "validation_coverage": 0.6667
    }  # fmt: skip


# -- the rule -----------------------------------------------------------------------------------------------------


def judge(rule, p, q, draft, u, follows=None):
    """Acceptance probabilities, up to 1, by the rule bound to a backbone of as many tokens as p has."""
    p, q = (torch.as_tensor(x, dtype=torch.float64) for x in (p, q))
    draft = torch.tensor(draft)
    embedding = torch.arange(p.shape[1])[:, None].float()
    rule.bind(SimpleNamespace(device="cpu", output=SimpleNamespace(embedding=embedding)))
    if follows is None:
        follows = [False] + [True] * (len(draft) - 1)
    accept, weight = rule(p, q, draft)
    alone, residual = rule.rule(p, q, draft)
    assert torch.equal(accept, alone) or accept.isnan().any()
    assert torch.equal(weight, residual)
    return rule.together(accept, p, q, draft, torch.tensor(follows), torch.tensor(u, dtype=torch.float64)).tolist()


P = [[0.2, 0.5, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]
Q = [[0.5, 0.2, 0.2, 0.1], [0.2, 0.4, 0.3, 0.1], [0.4, 0.4, 0.1, 0.1]]


def test_a_run_is_accepted_as_one_or_judged_token_by_token():
    """Drafts 0 0: p/q = 0.4 and 2, jointly 0.8. Refused, the first has 0.4 of what remains."""
    rule = JointPhrases(Strict(), [[0, 0]], tau=0.0)
    assert judge(rule, P, Q, [0, 0, 0], u=[0.79, 0.9, 0.9]) == [1, 1, pytest.approx(0.25)]
    assert judge(rule, P, Q, [0, 0, 0], u=[0.81, 0.0, 0.9]) == [
        pytest.approx(0.8 + 0.2 * 0.4), 1, pytest.approx(0.25)
    ]  # fmt: skip
    # p/q = 2 and 0.8, jointly above 1, are accepted whatever u.
    assert judge(rule, [P[1], [0.4] * 4], [Q[1], [0.5] * 4], [0, 0], u=[1 - 1e-9, 0.9]) == [1, 1]
    # No neighbours, or no phrase: each by itself.
    alone = [pytest.approx(0.4), 1, pytest.approx(0.25)]
    assert judge(rule, P, Q, [0, 0, 0], u=[0.0] * 3, follows=[False] * 3) == alone
    assert judge(JointPhrases(Strict(), [[0, 1]], tau=0.0), P, Q, [0, 0, 0], u=[0.0] * 3) == alone


def test_a_run_cut_off_by_the_windows_end_is_judged_token_by_token():
    rule = JointPhrases(Strict(), [[0, 0, 0]], tau=0.0)
    assert judge(rule, P, Q, [0, 0, 0], u=[0.19, 0.9, 0.9]) == [1, 1, 1]  # 0.4 * 2 * 0.25 = 0.2
    assert judge(rule, P[:2], Q[:2], [0, 0], u=[0.0, 0.0]) == [pytest.approx(0.4), 1]


def test_the_longest_phrase_wins_up_to_a_limit():
    runs = [[0, 0], [0, 0, 0]]
    accepted = [1, 1, 1]
    assert judge(JointPhrases(Strict(), runs, tau=0.0), P, Q, [0, 0, 0], u=[0.19, 0.9, 0.9]) == accepted
    limited = JointPhrases(Strict(), runs, tau=0.0, longest=2)
    assert judge(limited, P, Q, [0, 0, 0], u=[0.19, 0.9, 0.9]) == [1, 1, pytest.approx(0.25)]


def test_a_draft_stands_for_tokens_about_as_probable():
    """Draft 0 at item 0 has p = 0.2, as has token 2; at item 1 it has 0.4, token 1 0.3."""
    assert judge(JointPhrases(Strict(), [[2, 0]], tau=0.01), P, Q, [0, 0, 0], u=[0.5] * 3)[:2] == [1, 1]
    for tau, joint in (0.09, False), (0.11, True):
        accept = judge(JointPhrases(Strict(), [[2, 1]], tau=tau), P, Q, [0, 0, 0], u=[0.5] * 3)[:2]
        assert (accept == [1, 1]) == joint


def test_with_guidance_and_top_k():
    """Guidance 2: p from 2c - u = log(8, 2, 1, 1/4), top 2: (0.8, 0.2, 0, 0). q from c = u, top 2: (0.5, 0.5, 0, 0).
    Drafts 1 0: ratios 0.4 and 1.6, jointly 0.64."""
    sampling = Sampling(guidance=2.0, top_k=2)
    target = torch.tensor([[4.0, 2, 1, 1], [2, 2, 1, 4]]).double().log()
    draft = torch.tensor([[3.0, 3, 1, 1], [3, 3, 1, 1]]).double().log()
    p, q = (guided_probabilities(x[:, None].expand(2, 2, 4), sampling) for x in (target, draft))
    torch.testing.assert_close(p[0], torch.tensor([0.8, 0.2, 0, 0]).double())
    torch.testing.assert_close(q[0], torch.tensor([0.5, 0.5, 0, 0]).double())
    rule = JointPhrases(Strict(), [[1, 0]])
    assert judge(rule, p, q, [1, 0], u=[0.63, 0.9]) == [1, 1]
    assert judge(rule, p, q, [1, 0], u=[0.65, 0.9]) == [pytest.approx(0.64 + 0.36 * 0.4), 1]
    # A token outside the top 2 has p = 0: draft 1 stands for it when tau reaches its own 0.2.
    for tau, first in (0.19, 0.4), (0.21, 1):
        assert judge(JointPhrases(Strict(), [[2, 0]], tau=tau), p, q, [1, 0], u=[0.1, 0.9])[0] == pytest.approx(first)


def test_what_p_rules_out_is_never_accepted_and_what_q_ruled_out_is():
    rule = JointPhrases(Strict(), [[0, 0]], tau=0.0)
    never, sure, half = [0.0, 1.0], [1.0, 0.0], [0.5, 0.5]
    assert judge(rule, [never, sure], [half, half], [0, 0], u=[1e-9, 0.5])[0] == 0
    assert judge(rule, [half, half], [never, half], [0, 0], u=[1 - 1e-9, 0.5]) == [1, 1]
    assert judge(rule, [half, never], [never, half], [0, 0], u=[1e-9, 0.5])[1] == 0
    first, second = judge(rule, [never, half], [never, half], [0, 0], u=[1e-9, 0.5])
    assert first == second == 1  # 0/0: it stands, as by the rule that is wrapped


def test_where_p_is_q_everything_is_accepted():
    rule = JointPhrases(Strict(), [[0, 0], [2, 3]])
    assert judge(rule, P, P, [0, 0, 3], u=[1 - 1e-9] * 3) == [1, 1, 1]


def test_without_phrases_it_is_the_rule_that_it_wraps():
    for drafts in [0, 0, 0], [3, 1, 2]:
        ratios = [min(1, p[t] / q[t]) for p, q, t in zip(P, Q, drafts, strict=True)]
        assert judge(JointPhrases(Strict(), []), P, Q, drafts, u=[0.0] * 3) == pytest.approx(ratios)


def test_other_rules_judge_token_by_token():
    """Amplify doubles 0.4; the joint ratio stays that of p and q. GSD: around draft 0, by p 1 0 2 3, stand 1 and 2."""
    rule = JointPhrases(Amplify(2.0), [[0, 0]], tau=0.0)
    assert judge(rule, P, Q, [0, 0, 0], u=[0.81, 0.0, 0.9]) == [
        pytest.approx(0.8 + 0.2 * 0.8), 1, pytest.approx(0.5)
    ]  # fmt: skip
    grouped = JointPhrases(Grouped(2, gap=0.15, distance=1e6), [[0, 0]], tau=0.0)
    assert judge(grouped, P, Q, [0, 0, 0], u=[0.81, 0.0, 0.9])[0] == pytest.approx(0.8 + 0.2 * (0.4 / 0.7))
    assert grouped.lossless is rule.lossless is False


def test_one_number_decides_both_questions_as_two_would():
    """P(the first is accepted) = joint + (1 - joint) * its own: 0.8 + 0.2 * 0.4, over evenly spread numbers."""
    rule = JointPhrases(Strict(), [[0, 0]], tau=0.0)
    numbers = ((np.arange(2000) + 0.5) / 2000).tolist()
    accept = judge(rule, P[:2] * 1000, Q[:2] * 1000, [0, 0] * 1000, u=numbers, follows=[False, True] * 1000)
    accepted = [u < a for u, a in zip(numbers[::2], accept[::2], strict=True)]
    assert np.mean(accepted) == pytest.approx(0.88, abs=1e-3)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: JointPhrases(Strict(), [], tau=-0.1), "tau is -0.1; expected a difference of probabilities"),
        (lambda: JointPhrases(Strict(), [], longest=1), "longest is 1; expected at least 2 tokens"),
        (lambda: JointPhrases(JointPhrases(Strict(), []), []), "rule is JointPhrases; expected one that judges token"),
    ],
)
def test_bad_settings_name_the_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# -- in the engine ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backbone():
    return micro.janus((3, 4), vocabulary=3, scale=20.0)


@pytest.fixture(scope="module")
def heads(backbone):
    torch.manual_seed(0)
    return Heads(HeadSpec(backbone.width, backbone.vocabulary, k_horizontal=3, k_vertical=2))


def test_neighbours_are_drafts_side_by_side_in_a_row():
    """Rows of 4: samples 0, 0, 0, 0, 0, 1, 1, 1; the last but one has no draft."""
    host_sample = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1])
    host_position = np.array([2, 3, 4, 5, 7, 8, 9, 10, 11])
    drafted = np.array([True, True, True, True, True, True, True, False, True])
    items = Items(host_sample, host_position, *torch.from_numpy(np.stack([host_sample, host_position])), [])
    state = SimpleNamespace(grid=Grid(3, 4), device=torch.device("cpu"))
    assert State.follows(state, items, drafted).tolist() == [
        False, True, False, True, False, False, True, False, False
    ]  # fmt: skip


ALL_PAIRS = [[a, b] for a in range(3) for b in range(3)]
DECODERS = {
    "sjd": lambda rule: Decoder(JacobiWindow(rows=1.5), Random(), rule),
    "sjd, coupled": lambda rule: Decoder(JacobiWindow(rows=1.5, coupled=True), Random(), rule),
    "pjd": lambda rule: Decoder(ParallelJacobi(length=3, lag=2), Copy(), rule),
    "mtp": lambda rule: Decoder(Prefix(length=3, within_row=True), HeadDrafter(), rule),
    "ssd": lambda rule: Decoder(Rows(rounds=2, chunk=3), HeadDrafter(), rule),
    "ssd merged": lambda rule: Decoder(Wave(rounds=2, chunk=3), HeadDrafter(), rule),
}


@pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS.keys())
def test_a_sample_is_the_same_alone_and_in_a_batch(backbone, heads, make):
    """So no run goes from one sample to the next; and phrases change what is accepted, so there are runs."""
    decoder = make(JointPhrases(Strict(), ALL_PAIRS)).bind(backbone, heads)
    assert not decoder.exact(backbone)
    prompts = micro.prompts(6)
    together = decoder(backbone, prompts, range(6), Sampling())
    for b in range(6):
        one = type(prompts)(prompts.ids[:, b : b + 1], prompts.attend[:, b : b + 1])
        assert torch.equal(decoder(backbone, one, [b], Sampling()).tokens[0], together.tokens[b])
    strict = make(Strict()).bind(backbone, heads)(backbone, prompts, range(6), Sampling())
    assert not torch.equal(strict.tokens, together.tokens)


@pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS.keys())
def test_without_phrases_a_decoder_is_as_it_was(backbone, heads, make):
    prompts = micro.prompts(4)
    without, strict = (
        make(rule).bind(backbone, heads)(backbone, prompts, range(4), Sampling())
        for rule in (JointPhrases(Strict(), []), Strict())
    )
    assert torch.equal(without.tokens, strict.tokens)
    assert without.trace.passes == strict.trace.passes


@pytest.mark.parametrize(
    "schedule",
    [
        ZipAR(lead=2),
        JacobiWindow(rows=0.5),
        Prefix(length=1),
        Chunks(length=3, rounds=0),
        Rows(rounds=0, first_row_rounds=0),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_a_schedule_without_runs_of_drafts_is_refused(backbone, heads, schedule):
    message = f"JointPhrases judges runs of drafts, but {type(schedule).__name__} with these settings never judges two"
    with pytest.raises(ValueError, match=message):
        Decoder(schedule, Copy(), JointPhrases(Strict(), ALL_PAIRS)).bind(backbone, heads)


def test_a_library_is_refused_where_it_is_not_there_or_of_other_tokens(backbone, tmp_path):
    path = tmp_path / "phrases.json"
    rule = JointPhrases(Strict(), str(path))
    missing = f"there is no phrase library {path}; run stages=[cache,phrases] with these settings first"
    with pytest.raises(phrases.PhrasesError, match=re.escape(missing)):
        rule.bind(backbone)
    phrases.save(path, phrases.Library("another", "0123", 3))
    with pytest.raises(phrases.PhrasesError, match=r"of fingerprint 0123 \(backbone another\), but micro has"):
        rule.bind(backbone)
    phrases.save(path, library(backbone, [0, 1]))
    assert rule.bind(backbone).table.tokens.tolist() == [[0, 1]]


# -- the stage ----------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(cached, tmp_path):
    shutil.copytree(cached / "cache", tmp_path / "cache")
    return tmp_path


def tokens_of(directory, split):
    """[n, 4, 4] of the cached prompts of one split, read without our own reader."""
    tokens = []
    for path in sorted(directory.glob("*.tar")):
        with tarfile.open(path) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}
        for name, content in files.items():
            if name.endswith(".json") and split_of(json.loads(content)["prompt"]) is split:
                payload = files[name.replace(".json", ".safetensors")]
                tokens.append(safetensors.torch.load(payload)["tokens"])
    return torch.stack(tokens)


def test_phrases_are_those_of_the_training_prompts(copied, make_run, caplog):
    caplog.set_level(logging.INFO)
    run = make_run(copied, "phrases.merges=40", "stages=[phrases]")
    stage.check(run)
    stage.run(run)
    path = copied / "cache/phrases-40-of-60.json"
    made = phrases.load(path)
    assert run.cfg.phrases.path == str(path)
    rows = tokens_of(copied / "cache", Split.TRAIN).flatten(0, 1)
    held_out = tokens_of(copied / "cache", Split.VALIDATION)
    assert len(rows) == 4 * (60 - len(held_out))
    assert made.phrases == merged_by_a_loop(rows, 40)
    assert (made.backbone, made.vocabulary) == ("micro", 12)
    assert made.learned_from["merges"] == 40
    assert made.learned_from["samples"] == 60
    fits = torch.nn.functional.one_hot(held_out.long(), 12).bool().flatten(0, 2)
    first = runs_by_a_loop(fits, [i % 4 > 0 for i in range(len(fits))], made.phrases)
    covered = sum(size for size in Counter(first).values() if size > 1)
    assert made.statistics["validation_coverage"] == pytest.approx(covered / len(first), abs=1e-4)
    assert made.statistics["validation_samples"] == len(held_out) > 0
    assert sum(made.statistics["by_length"].values()) == made.statistics["phrases"] == len(made.phrases)
    assert "they cover" in caplog.text


def test_only_what_is_not_there_is_learned(copied, make_run, caplog):
    caplog.set_level(logging.INFO)
    first = make_run(copied, "phrases.merges=10")
    path = copied / "cache/phrases-10-of-60.json"
    stage.run(first)
    made, content = path.stat().st_mtime_ns, path.read_bytes()
    stage.run(first)
    assert path.stat().st_mtime_ns == made
    assert f"phrases in {path} are learned already" in caplog.text
    stage.run(make_run(copied, "phrases.merges=5"))
    assert path.stat().st_mtime_ns == made
    assert len(phrases.load(copied / "cache/phrases-5-of-60.json").phrases) == 5
    path.write_bytes(content[:-9])
    stage.run(first)
    assert path.read_bytes() == content
    assert "run stages=[cache,phrases] to mend it" in caplog.text


def test_phrases_of_another_cache_are_learned_anew(copied, make_run, caplog):
    run = make_run(copied, "phrases.merges=10")
    stage.run(run)
    before = phrases.load(copied / "cache/phrases-10-of-60.json").learned_from
    write_json(copied / "cache/manifest.json", read_json(copied / "cache/manifest.json") | {"seed": 1})
    stage.run(run)
    after = phrases.load(copied / "cache/phrases-10-of-60.json").learned_from
    assert before["cache"] != after["cache"]
    assert "it is learned again from" in caplog.text


def test_a_cache_that_is_not_there_or_cut_short_is_named(copied, make_run, tmp_path):
    with pytest.raises(CacheError, match="run the cache stage first"):
        stage.check(make_run(tmp_path / "none", "stages=[phrases]"))
    stage.check(make_run(tmp_path / "none", "stages=[cache,phrases]"))
    tar = copied / "cache/00001.tar"
    tar.write_bytes(tar.read_bytes()[: tar.stat().st_size // 2])
    with pytest.raises(CacheError, match="re-run the cache stage"):
        stage.run(make_run(copied))
    assert not list((copied / "cache").glob("phrases*"))


def test_a_library_cannot_be_written_to_a_url(make_run, tmp_path):
    run = make_run(tmp_path, "cache.dir=https://example.org/cache", "stages=[phrases]")
    with pytest.raises(ValueError, match=r"phrases.path is https://example.org/cache/phrases-8000-of-60.json; "):
        stage.check(run)


# -- configured ---------------------------------------------------------------------------------------------------


def test_a_decoder_is_refused_before_anything_is_done_without_its_library(make_run, tmp_path):
    missing = r"decoder sjd_pv: there is no phrase library .*phrases-8000-of-60.json; run stages=\[cache,phrases\] with"
    with pytest.raises(ValueError, match=missing):
        make_run(tmp_path, "decoder=[ar,sjd_pv]")
    make_run(tmp_path, "decoder=[ar,sjd_pv]", "stages=[cache,phrases,decode]")
    make_run(tmp_path, "decoder=[ar,sjd_pv]", "stages=[cache,train]")


GSD = "decoder.sjd_pv.rule.rule._target_=ssd_train.decoding.rules.grouped.Grouped"


@pytest.mark.parametrize("overrides", [["decoder=sjd_pv"], ["decoder=sjd_pv", GSD], ["decoder=ssd_phrases"]])
def test_configured_decoders_decode_with_the_library(copied, make_run, overrides):
    stage.run(make_run(copied))
    run = make_run(copied, *overrides)
    ((name, decoder),) = configured_decoders(run).items()
    assert run.cfg.decoder[name].rule["library"] == str(copied / "cache/phrases-8000-of-60.json")
    decoder.bind(run.backbone, Heads(HeadSpec(run.backbone.width, 12, k_horizontal=2, k_vertical=2)))
    assert len(decoder.rule.table.tokens) > 10
    assert isinstance(decoder.rule.rule, Grouped) == (GSD in overrides)
    assert not decoder.exact(run.backbone)
    tokens = decoder(run.backbone, micro.prompts(2), range(2), run.sampling).tokens
    assert ((tokens >= 0) & (tokens < 12)).all()


def test_phrases_are_made_only_when_asked_for_and_at_least_one(make_run, tmp_path):
    assert config.Stage.phrases not in config.Config().stages
    with pytest.raises(ValueError, match=r"phrases.merges is 0; expected at least 1"):
        make_run(tmp_path, "phrases.merges=0")
