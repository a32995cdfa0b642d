"""The plan's arithmetic: exact where it is exact, and against measured memory where it estimates."""

import json

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from memory import Peak
from omegaconf import OmegaConf

from ssd_train import config, metrics, plan, stages
from ssd_train.backbones.sketches import sketch
from ssd_train.decoding.drafters.heads import HeadDrafter
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.rules.strict import Strict
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.decoding.schedules.rows import Rows
from ssd_train.distributions import Sampling
from ssd_train.heads import Heads
from ssd_train.module import HeadModule
from ssd_train.run import Run
from ssd_train.shards import CacheDtype

CLOSE = (0.95, 1.3)  # estimate over measurement


def composed(*overrides):
    config.register()
    with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        return compose("config", ["output=unused", "device=cpu", *overrides])


def sizes(model):
    cfg = composed(f"+model={model}")
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
    parameters = 10 * (8 * 4096**2 + 4096)
    one, ddp, fsdp = (
        plan.train_stage(cfg, s, 8, world, sharded) for world, sharded in ((1, False), (4, False), (4, True))
    )
    assert ddp - one == 4 * parameters  # the buckets that gradients are exchanged in
    assert one - fsdp == 16 * parameters - 16 * parameters // 4 - 2 * 4 * parameters // 10
    cfg.head.ema = 0.99
    assert plan.train_stage(cfg, s, 8) - one == 4 * parameters


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
    ("train", 80, "train.batch_size=16 needs .*set train.batch_size=6 .*accumulate_grad_batches=3"),
    ("train", 30, "train.batch_size=16 needs .*not even at 1"),
    ("decode", 40, "decode.batch_size=16 needs .*set decode.batch_size="),
])  # fmt: skip
def test_what_is_refused_and_its_mend(stage, gigabytes, message):
    cfg, s = sizes("lumina")
    cfg.stages = [stage]
    cfg.train.batch_size = 16
    with pytest.raises(ValueError, match=message):
        plan.check_fit(cfg, s, gigabytes * plan.GB, "cuda:0")


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


LOSSES = {
    "smooth L1": {},
    "with KL": {"kl": 0.1},
    "all three": {"kl": 0.1, "total_variation": 0.1},
    "KL alone": {"smooth_l1": 0.0, "kl": 1.0},
}


@pytest.mark.parametrize("context", [1, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("space, loss", [("token", {}), *(("latent", loss) for loss in LOSSES.values())],
                         ids=["token", *LOSSES])  # fmt: skip
def test_training_takes_what_is_said(space, loss, precision, context, monkeypatch):
    cfg = composed(
        "+experiment=smoke_janus", *(f"model.backbone.architecture.{x}" for x in WIDER["janus"]), *LARGER["janus"],
        f"head.space={space}", f"head.context={context}", f"train.precision={precision}", "head.hidden=null",
    )  # fmt: skip
    cfg.head.loss = OmegaConf.merge(cfg.head.loss, loss)
    backbone = sketch(cfg.model, "cpu")
    s, grid = plan.Sizes.of(backbone), backbone.grid
    spec = plan.head_spec(cfg, s)
    heads = Heads(spec)
    module = HeadModule(heads, backbone.output, grid, Sampling(guidance=3.0), cfg.head, steps=10, seed=0)
    monkeypatch.setattr(module, "log", lambda *args, **kwargs: None)
    monkeypatch.setattr(module, "log_dict", lambda *args, **kwargs: None)
    monkeypatch.setattr(HeadModule, "global_step", 0)
    batch = {
        "index": torch.arange(4),
        "tokens": torch.zeros(4, grid.height, grid.width, dtype=torch.int64),
        "hidden": torch.randn(4, 2, grid.height, grid.width, backbone.width),
    }
    with Peak() as peak:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = module.training_step(batch, 0)
        loss.backward()
    gradients = 4 * sum(p.numel() for p in heads.parameters())
    estimate = plan.activations(s, spec, 4, dict(cfg.head.loss), precision) + gradients
    close(estimate, peak.bytes)


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
