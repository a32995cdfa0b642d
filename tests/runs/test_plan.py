"""The plan's arithmetic: exact where it is exact, and against measured memory where it estimates."""

import json

import composing
import micro
import pytest
import torch
from hydra.errors import InstantiationException
from memory import Peak
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from ssd_train import stages
from ssd_train.backbones.base import PromptBatch
from ssd_train.backbones.kv_cache import KVCache
from ssd_train.backbones.sketches import sketch
from ssd_train.cache.shards import CacheDtype
from ssd_train.decoding.drafters.guess import Random
from ssd_train.decoding.drafters.heads import HeadDrafter
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.rules.strict import Strict
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.decoding.schedules.rows import Rows
from ssd_train.distributions import Sampling
from ssd_train.evaluation import metrics
from ssd_train.grid import Grid
from ssd_train.heads.predictors import Heads
from ssd_train.runs import plan
from ssd_train.runs.run import Run
from ssd_train.training.datamodule import Batch
from ssd_train.training.module import HeadModule
from ssd_train.training.teacher import Teacher

CLOSE = (0.95, 1.3)  # estimate over measurement


def composed(*overrides):
    """Without a corrector, unless it is asked for."""
    without = [] if any("head.corrector" in override for override in overrides) else ["head.corrector=null"]
    return composing.composed(*without, "decoder=[ar,ssd]", *overrides)


def sizes(model, *overrides):
    cfg = composed(f"+model={model}", *overrides)
    return cfg, plan.Sizes.of(sketch(cfg.model))


# -- full size on paper -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model, parameters, kv_kib, samples, published_gb", [
    # transformers.md's sizes, and 2 streams * tokens * width * 2 bytes a sample
    ("janus_pro_1b", 1.87e9, 192, 60_000, 60_000 * 2 * 576 * 2048 * 2 / 1e9),
    ("janus_pro_7b", 6.99e9, 480, 60_000, 60_000 * 2 * 576 * 4096 * 2 / 1e9),
    ("lumina", 7.01e9, 512, 20_000, 20_000 * 2 * 2304 * 4096 * 2 / 1e9),
    ("lumina_512", 7.01e9, 512, 20_000, 20_000 * 2 * 1024 * 4096 * 2 / 1e9),
    ("lumina_1024", 7.01e9, 512, 20_000, 20_000 * 2 * 4096 * 4096 * 2 / 1e9),
    ("emu3", 8.76e9, 128, 5_000, 5_000 * 2 * 8100 * 4096 * 2 / 1e9),
])  # fmt: skip
def test_the_published_models(model, parameters, kv_kib, samples, published_gb):
    cfg, s = sizes(model)
    contents = plan.plan(cfg, s)
    assert contents["parameters"] == pytest.approx(parameters, rel=2e-3)
    assert contents["weights"] == pytest.approx(2 * parameters, rel=0.04)  # bfloat16, and tables kept beside them
    assert contents["kv_cache"]["token_a_row"] == kv_kib * 1024
    assert contents["kv_cache"]["image"] == 2 * (plan.PROMPT + s.grid.sequence_length) * kv_kib * 1024
    cache = contents["cache"]["published"]
    assert cache["samples"] == samples
    assert cache["bfloat16"] / 1e9 == pytest.approx(published_gb, rel=0.01)
    assert cache["float32"] / 1e9 == pytest.approx(2 * published_gb, rel=0.01)
    assert cache["int8"] / 1e9 == pytest.approx(published_gb / 2, rel=0.01)
    d = s.width
    assert contents["heads"] == {"count": 10, "largest": 8 * d * d + d, "parameters": 10 * (8 * d * d + d)}
    if d == 4096:
        assert contents["heads"]["largest"] == pytest.approx(134e6, rel=2e-3)
    assert contents["training"][-1]["gpus"] == 4
    # A worker's shuffle buffer holds samples, and those of large models are large.
    assert cfg.train.shuffle_buffer * cache["bfloat16"] / samples < 3 * plan.GB
    # What the yaml comes with fits the GPU that it says.
    assert all(contents["cards"]["A100"][key]["fits"] for key in contents["batch_sizes"])
    assert all(contents["cards"]["H200"][key]["fits"] for key in contents["batch_sizes"])


def test_what_a_card_holds():
    cards = plan.plan(*sizes("emu3"))["cards"]
    assert cards["RTX 4090"]["weights_fit"]
    assert cards["RTX 4090"]["cache.batch_size"]["largest"] == 0
    assert 1 <= cards["A100"]["cache.batch_size"]["largest"] < cards["H200"]["cache.batch_size"]["largest"]


def test_the_optimiser_is_shared_by_fsdp_and_copied_by_ddp():
    cfg, s = sizes("janus_pro_7b")
    cfg.train.precision = "32-true"
    parameters = 10 * (8 * 4096**2 + 4096)
    one, ddp, fsdp = (
        plan.train_stage(cfg, s, 8, world, sharded) for world, sharded in ((1, False), (4, False), (4, True))
    )
    assert ddp - one == 4 * parameters  # the buckets that gradients are exchanged in
    assert one - fsdp == 16 * parameters - 16 * parameters // 4 - 3 * 4 * parameters // 10
    cfg.head.ema = 0.99
    assert plan.train_stage(cfg, s, 8) - one == 4 * parameters


# -- time -----------------------------------------------------------------------------------------------------


SIZES = plan.Sizes(
    grid=Grid(2, 3, end_of_line=True), parameters=0, weights=0, output=0, readout=40, decoder=60, width=4, vocabulary=5,
    layers=2, inner=8, heads=4, kv_heads=2, head_dim=3, value=2,
)  # fmt: skip


@pytest.mark.parametrize("tokens, bandwidth, flops, seconds", [
    # 100 weights of 2 bytes and, of 10 slots in 6 rows, 2 * 2 * 2 * 3 numbers of 2 bytes; arithmetic costs nothing
    (1, 1.0, 1e9, 100 * 2 + 6 * 10 * 24 * 2),
    # 6 rows of 7 tokens: 2 FLOP a weight, and 4 for each of 2 * 4 * 3 numbers of 10 keys
    (7, 1e9, 1.0, 6 * 7 * (2 * 100 + 4 * 24 * 10)),
])  # fmt: skip
def test_a_pass_is_bound_by_memory_or_by_arithmetic(tokens, bandwidth, flops, seconds):
    card = plan.Card(memory=0, bandwidth=bandwidth, flops_16=flops, flops_32=0.0)
    assert plan.pass_seconds(SIZES, card, images=3, tokens=tokens, width=10) == pytest.approx(seconds)


@pytest.mark.parametrize("parts", [[Autoregressive()], [Rows(1, chunk=3), Random(), Strict()]], ids=["ar", "ssd"])
def test_passes_are_those_that_decoding_makes(parts, model, prompt_length, monkeypatch):
    """With end-of-line tokens riding along, whose slots count."""
    _, backbone, prompts = model
    made, begin = [], KVCache.begin

    def watch(cache, slots):
        made.append((slots.index.shape[-1], slots.width))
        return begin(cache, slots)

    monkeypatch.setattr(KVCache, "begin", watch)
    Decoder(*parts).bind(backbone)(backbone, prompts, range(BATCH), Sampling())
    assert plan.passes(parts[0], backbone.grid) == made


@pytest.mark.parametrize(
    "settings",
    [
        ["head.loss.kl=0.1"],
        ["head.corrector.width=16", "head.corrector.pairs=6", "head.k_horizontal=1", "head.k_vertical=1"],
    ],
    ids=["heads", "corrector"],
)
def test_hours_of_training_are_those_of_its_products(settings, monkeypatch):
    """Counted by PyTorch in one step on one sample, which validation's share of the samples does not train on."""
    cfg = composed("+experiment=smoke_janus", "train.epochs=2", "train.batch_size=1", *settings)
    module, batch = training(cfg, sketch(cfg.model, "cpu"), 1, monkeypatch)
    with FlopCounterMode(display=False) as counter:
        module.training_step(batch, 0).backward()
    s = plan.Sizes.of(sketch(cfg.model))
    assert plan.training_flops(cfg, s) == pytest.approx(counter.get_total_flops(), rel=0.05)
    card = plan.Card(10**15, bandwidth=1.0, flops_16=1.0, flops_32=3600.0)
    hours = plan.hours(cfg, s, card, {"some": 9}, {})
    assert hours["train"]["some"] == pytest.approx(9 * 8 / 9 * 2 * plan.training_flops(cfg, s) / 3600**2)


def test_hours_add_up():
    cfg, s = sizes("janus_pro_7b")
    made = plan.passes(Autoregressive(), s.grid)
    hours = {card: plan.hours(cfg, s, sheet, {"a": 640, "b": 1280}, {"ar": made}) for card, sheet in plan.CARDS.items()}
    card = plan.CARDS["A100"]
    batch = sum(plan.pass_seconds(s, card, 64, tokens, width) for tokens, width in made)
    assert hours["A100"]["cache"] == pytest.approx({"a": 10 * batch / 3600, "b": 20 * batch / 3600})
    # At least all weights and half of the last KV cache are read in each of 576 passes.
    floor = 576 * (2 * 6.2e9 + plan.kv_cache(s, 64) / 2) / card.bandwidth
    assert floor < batch < 1.5 * floor
    likelihood = plan.pass_seconds(s, card, 32, s.grid.sequence_length, s.slots)
    by_batch = {n: plan.image_seconds(s, card, n, made) for n in (1, 32)}
    assert hours["A100"]["decode"]["ar"] == pytest.approx((4 * (by_batch[32] + likelihood) + 11 * by_batch[1]) / 3600)
    assert hours["H200"]["cache"]["a"] < hours["A100"]["cache"]["a"] < hours["RTX 4090"]["cache"]["a"]
    assert hours["RTX 4090"]["train"] == {"a": None, "b": None}  # the heads' optimiser alone is 21 GB


def test_decoders_that_look_at_outcomes_have_no_hours():
    cfg, s = sizes("janus_pro_1b")
    cfg.decoder = composed("+model=janus_pro_1b", "decoder=[ar,sjd,ssd]").decoder
    assert list(plan.plan(cfg, s)["cards"]["A100"]["hours"]["decode"]) == ["ar", "ssd"]


# -- the machine's memory -----------------------------------------------------------------------------------------


def test_the_machine_s_memory():
    cfg, s = sizes("emu3")
    sample = 2 * 8100 * 4096 * 4
    cfg.train.update(workers=2, shuffle_buffer=100, validation_samples=10, batch_size=3)
    need = plan.host(cfg, s)
    assert need["cache"] == pytest.approx(64 * sample / 2 + sample / 2, rel=1e-3)
    assert need["train"] == pytest.approx(10 * sample + 2 * (100 * sample / 2 + 3 * 3 * sample), rel=1e-3)
    cfg.train.workers = 0
    cfg.train.validation_samples = 100
    assert plan.host(cfg, s)["train"] == 200 * sample
    cfg.cache.dtype = CacheDtype.int8
    cfg.train.update(workers=2, validation_samples=1)
    less = plan.host(cfg, s)["train"]
    assert less == pytest.approx(sample + 2 * (100 * sample / 4 + 3 * 3 * sample), rel=2e-3)
    cfg.cache.samples = 3
    assert plan.host(cfg, s)["cache"] == pytest.approx(3 * sample / 2 + sample / 4, rel=1e-3)


@pytest.mark.parametrize("stage, message", [
    ("cache", r"the cache stage needs about \d+.\d GB of the machine's memory for emu3, and there are 8.0 GB; lower "
              "cache.shard_size"),
    ("train", r"the train stage needs .*lower train.shuffle_buffer \(samples, each worker's\), train.workers or"),
])  # fmt: skip
def test_what_the_machine_cannot_hold_is_refused(stage, message):
    cfg, s = sizes("emu3")
    cfg.stages = [stage]
    with pytest.raises(ValueError, match=message):
        plan.check_host(cfg, s, 8 * plan.GB)
    plan.check_host(cfg, s, 80 * plan.GB)
    cfg.stages = ["decode"]
    plan.check_host(cfg, s, 8 * plan.GB)


def test_largest():
    assert [plan.largest(lambda n: 10 + 3 * n, memory) for memory in (9, 12, 13, 15, 16, 100)] == [0, 0, 1, 1, 2, 30]


def test_tiny_s_architecture_is_its_checkpoint_s():
    cfg, s = sizes("tiny")
    assert (s.layers, s.width, s.heads, s.kv_heads, s.head_dim, s.value) == (4, 256, 8, 8, 32, 4)
    assert "architecture" not in cfg.model


def test_the_stage_writes_json_and_a_table(tmp_path, caplog):
    run = Run(composed("+model=lumina", "stages=[plan]", f"output={tmp_path}", "cache.dtype=int8"))
    with caplog.at_level("INFO"):
        stages.STAGES["plan"].run(run)
    contents = json.loads((tmp_path / "plan.json").read_text())
    assert contents["model"] == "lumina"
    assert contents["end_of_line"] is True
    table = (tmp_path / "plan.md").read_text()
    assert table.strip() in caplog.text
    for text in ("7,", "512 KiB a token a row", "134.2M the largest", "755 GB as bfloat16", "| RTX 4090, 24.0 GB |"):
        assert text in table
    assert "backbone" not in vars(run)  # nothing was loaded


def test_the_corrector_stands_beside_the_heads():
    """Twice as many images once a step needs more pairs than one of them has tokens."""
    for pairs, images in (576, 1), (577, 2):
        cfg, s = sizes("janus_pro_7b", "head.corrector.width=1024", f"head.corrector.pairs={pairs}")
        contents = plan.plan(cfg, s)
        d, m = 4096, 1024
        assert contents["corrector"] == {"parameters": 10 * d * m + 4 * m**2 + m, "images_a_step": images}
        assert contents["heads"]["count"] == 10
        assert f"corrector | 46.14M parameters; a training step feeds {images} image(s) more" in plan.markdown(contents)


def test_planning_is_not_a_default_stage():
    assert [stage.name for stage in composed("+model=tiny").stages] == ["cache", "train", "export", "decode"]


# -- refusing -----------------------------------------------------------------------------------------------------


def test_a_run_that_cannot_fit_is_refused_before_loading(monkeypatch):
    monkeypatch.setattr(plan, "device_memory", lambda device: 24 * plan.GB)
    run = Run(composed("+model=lumina", "stages=[cache]"))
    with pytest.raises(ValueError, match=r"cache.batch_size=16 needs about \d+.\d GB for lumina, and there are 24.0 GB "
                                         r"on cpu; set cache.batch_size=3"):  # fmt: skip
        run.backbone  # noqa: B018
    run.cfg.cache.batch_size = 3
    with pytest.raises(InstantiationException, match="the checkpoint Alpha-VLLM/Lumina-mGPT-7B-768 is no directory"):
        run.backbone  # noqa: B018


@pytest.mark.parametrize("stage, gigabytes, message", [
    ("cache", 10, "does not fit: its weights alone are 14.2 GB"),
    ("train", 45, "train.batch_size=16 needs .*set train.batch_size=8 .*accumulate_grad_batches=2"),
    ("train", 30, "train.batch_size=16 needs .*not even at 1"),
    ("decode", 40, "decode.batch_size=16 needs .*set decode.batch_size="),
])  # fmt: skip
def test_what_is_refused_and_its_mend(stage, gigabytes, message):
    cfg, s = sizes("lumina")
    cfg.stages = [stage]
    cfg.train.batch_size = 16
    with pytest.raises(ValueError, match=message):
        plan.check_fit(cfg, s, gigabytes * plan.GB, "cuda:0")


def test_heads_beyond_the_grid_are_refused_before_loading():
    run = Run(composed("+model=janus_pro_7b", "head.k_vertical=24", "stages=[cache,train]"))
    with pytest.raises(ValueError, match=r"head.k_horizontal=5, head.k_vertical=24; expected less than the width and "
                                         r"height of janus_pro_7b's 24x24 grid"):  # fmt: skip
        run.backbone  # noqa: B018
    with pytest.raises(ValueError, match=r"head.k_vertical=24"):
        stages.STAGES["plan"].run(run)
    plan.require_reach(composed("+model=janus_pro_7b", "head.k_vertical=23"), Grid(24, 24))


@pytest.mark.parametrize("setting, message", [
    ("model.backbone.size=[700,700]", "lumina has no size 700x700"),
    ("model.backbone.attention=flash_attention_2", "model.backbone.attention is 'flash_attention_2'; expected one of"),
    ("model.backbone.dtype=bf16", "model.backbone.dtype is 'bf16'; expected one of bfloat16"),
])  # fmt: skip
def test_settings_that_the_model_does_not_know_are_refused_before_loading(setting, message):
    run = Run(composed("+model=lumina", setting))
    with pytest.raises(ValueError, match=message):
        run.backbone  # noqa: B018


def test_only_the_stages_of_the_run_count():
    cfg, s = sizes("lumina")
    cfg.train.batch_size = 1000
    cfg.stages = ["cache", "decode"]
    plan.check_fit(cfg, s, 80 * plan.GB, "cuda:0")


def test_a_backbone_of_unknown_size_is_not_checked(caplog):
    cfg = composed("+model=lumina")
    del cfg.model.architecture
    with caplog.at_level("INFO"):
        plan.require_fit(cfg, torch.device("cpu"))
    assert "memory is not checked: the size of lumina is not known" in caplog.text


def test_this_machine_s_memory():
    assert 2**28 < plan.device_memory(torch.device("cpu")) < 2**45


def test_of_a_gpu_what_is_free_counts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * plan.GB, 80 * plan.GB))
    assert plan.device_memory(torch.device("cuda:0")) == 57 * plan.GB


# -- against measured memory --------------------------------------------------------------------------------------


WIDER = {
    "janus": [
        "text_config.hidden_size=128", "text_config.intermediate_size=344", "text_config.num_hidden_layers=4",
        "vision_config.projection_dim=128", "vq_config.projection_dim=128", "vq_config.image_token_embed_dim=128",
    ],
    "lumina": ["hidden_size=128", "intermediate_size=344", "num_hidden_layers=4"],
    "emu3": ["text_config.hidden_size=128", "text_config.intermediate_size=448", "text_config.num_hidden_layers=4"],
}  # fmt: skip
LARGER = {
    "janus": ["model.backbone.grid=[14,18]"],
    "lumina": ["model.backbone.resolution=256", "model.backbone.size=[224,256]"],
    "emu3": ["model.backbone.area=1600", "++model.backbone.quality=''", "++model.backbone.negative=bad"],
}
BATCH = 3


@pytest.fixture(scope="module", params=WIDER)
def model(request):
    """(configuration, backbone, prompts): proportions as in the real ones, small enough to measure."""
    family = request.param
    cfg = composed(
        f"+experiment=smoke_{family}", *(f"model.backbone.architecture.{x}" for x in WIDER[family]), *LARGER[family]
    )
    cfg.head.hidden = None
    backbone = sketch(cfg.model, "cpu")
    return cfg, backbone, backbone.encode_prompts(["a dog", "two very long cats", "sun"])


@pytest.fixture
def prompt_length(model, monkeypatch):
    monkeypatch.setattr(plan, "PROMPT", model[2].ids.shape[-1])


def close(estimate, measured):
    assert CLOSE[0] < estimate / measured < CLOSE[1], f"estimated {estimate}, measured {measured}"


def test_the_weights_are_all_that_is_loaded(model):
    _, backbone, _ = model
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (
        *backbone.parameters(), *backbone.buffers(), *backbone.output.buffers()
    )}  # fmt: skip
    assert plan.Sizes.of(backbone).weights == pytest.approx(sum(storages.values()), rel=1e-3)


def test_the_kv_cache_is_exactly_so_large(model, prompt_length):
    _, backbone, prompts = model
    cache = backbone.new_cache(prompts)
    with torch.inference_mode():
        backbone.prefill(prompts, cache)
    held = sum(t.numel() * t.element_size() for layer in cache._layers for t in layer)
    assert plan.kv_cache(plan.Sizes.of(backbone), BATCH) == held


def test_sampling_takes_what_is_said(model, prompt_length):
    _, backbone, prompts = model
    with Peak() as peak:
        Decoder(Autoregressive()).bind(backbone)(backbone, prompts, range(BATCH), Sampling(guidance=3.0, top_k=20))
    close(plan.sampling(plan.Sizes.of(backbone), BATCH), peak.bytes)


def test_drafting_and_the_likelihood_take_what_is_said(model, prompt_length):
    cfg, backbone, prompts = model
    s = plan.Sizes.of(backbone)
    heads = Heads(plan.head_spec(cfg, s)).eval().requires_grad_(False)
    decoder = Decoder(Rows(rounds=2), HeadDrafter(), Strict()).bind(backbone, heads)
    sampling = Sampling(guidance=3.0, top_k=20)
    with Peak() as peak:
        decoded = decoder(backbone, prompts, range(BATCH), sampling)
    close(plan.drafting(s, BATCH), peak.bytes)
    with Peak() as peak:
        metrics.negative_log_likelihood(backbone, prompts, decoded.tokens, sampling)
    close(plan.teacher_forcing(s, BATCH), peak.bytes)


def test_the_cache_stage_s_checks_take_no_more_than_is_said(model, prompt_length):
    _, backbone, prompts = model
    s = plan.Sizes.of(backbone)
    tokens = torch.zeros(BATCH, backbone.grid.size, dtype=torch.int64)
    with Peak() as peak:
        hidden = backbone.teacher_force(prompts, tokens)
        backbone.readout_error(prompts, tokens, hidden)
        stages.cache.storage_error(backbone, hidden, CacheDtype.int8, Sampling(guidance=3.0, top_k=20))
    assert peak.bytes < plan.cache_stage(s, BATCH) - s.weights


def training(cfg, backbone, images, monkeypatch):
    """A module for these heads, and a batch for it."""
    grid = backbone.grid
    heads = Heads(plan.head_spec(cfg, plan.Sizes.of(backbone)))
    teacher = Teacher(backbone, 3.0)
    module = HeadModule(
        heads, backbone.output, grid, Sampling(guidance=3.0), cfg.head, steps=10, seed=0, teacher=teacher
    )
    monkeypatch.setattr(module, "log", lambda *args, **kwargs: None)
    monkeypatch.setattr(module, "log_dict", lambda *args, **kwargs: None)
    monkeypatch.setattr(HeadModule, "global_step", 0)
    prompts = micro.prompts(images)
    encoded = lambda texts: PromptBatch(prompts.ids[:, : len(texts)], prompts.attend[:, : len(texts)])  # noqa: E731
    monkeypatch.setattr(backbone, "encode_prompts", encoded)
    return module, Batch(
        index=torch.arange(images),
        prompts=["a prompt"] * images,
        tokens=torch.zeros(images, grid.height, grid.width, dtype=torch.int64),
        hidden=torch.randn(images, 2, grid.height, grid.width, backbone.width),
    )


LOSSES = {
    "smooth L1": {},
    "with KL": {"kl": 0.1},
    "all three": {"kl": 0.1, "total_variation": 0.1},
    "KL alone": {"smooth_l1": 0.0, "kl": 1.0},
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("settings, loss", [
    *((settings, loss) for settings in ([], ["head.context=3"]) for loss in LOSSES.values()),
    *((["head.space=token", f"head.context={context}"], {}) for context in (1, 3)),
])  # fmt: skip
def test_training_takes_what_is_said(settings, loss, precision, monkeypatch):
    cfg = composed(
        "+experiment=smoke_janus", *(f"model.backbone.architecture.{x}" for x in WIDER["janus"]), *LARGER["janus"],
        "model.backbone.architecture.vq_config.num_embeddings=512",  # four times the width, as in Janus
        f"train.precision={precision}", "head.hidden=null", *settings,
    )  # fmt: skip
    cfg.head.loss = OmegaConf.merge(cfg.head.loss, loss)
    backbone = sketch(cfg.model, "cpu")
    s = plan.Sizes.of(backbone)
    module, batch = training(cfg, backbone, 4, monkeypatch)
    with Peak() as peak:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = module.training_step(batch, 0)
        loss.backward()
    gradients = 4 * sum(p.numel() for p in module.heads.parameters())
    estimate = plan.activations(s, module.heads.spec, 4, dict(cfg.head.loss), precision) + gradients
    close(estimate, peak.bytes)


def test_an_optimiser_that_is_not_fused_takes_what_is_said():
    """As in mixed precision, on a GPU: a number a weight more than it keeps, at once for all of them."""
    weights = [torch.nn.Parameter(torch.randn(100, 50)) for _ in range(10)]
    optimiser = torch.optim.AdamW(weights, fused=False, foreach=True)
    for _ in range(2):  # the first makes the moments
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        with Peak() as peak:
            optimiser.step()
    close(4 * sum(weight.numel() for weight in weights), peak.bytes)


def test_mixed_precision_counts_in_the_plan():
    cfg, s = sizes("janus_pro_7b")
    parameters = 10 * (8 * 4096**2 + 4096)
    mixed, more = plan.train_stage(cfg, s, 1), plan.train_stage(cfg, s, 64)
    cfg.train.precision = "32-true"
    assert more < plan.train_stage(cfg, s, 64)  # z and the hidden tensors are half as large
    kept = 2 * s.grid.size * s.width * 4 + 4 * s.output + s.weights
    assert mixed == kept + (plan.ADAM + 4) * parameters  # of one image, what the optimiser makes is more than the rest


def test_small_numbers_can_be_read():
    assert [plan._size(n) for n in (1234, 56_789_000, 2_340_000_000)] == ["1 kB", "57 MB", "2.3 GB"]
    assert [plan._time(hours) for hours in (None, 1e-6, 0.5, 2.04, 12.3)] == ["-", "< 1 s", "30 min", "2.0 h", "12 h"]


def test_the_yardstick_measures_peaks():
    with Peak() as peak, torch.inference_mode():
        a = torch.zeros(1000)
        b = a + 1
        del a
        view = b[:10]
        view += 1
        del b
        torch.zeros(500)
    assert peak.bytes == 8000
    assert peak.live == 4000
