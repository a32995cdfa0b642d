"""The configuration's schema, where its files lie, and what identifies a run.

Nodes we own are dataclasses, so a typo fails when the configuration is composed, with the valid names. Pluggable nodes
(``model.backbone``, ``model.prompts``, ``decoder.*``, ``logger``) name a ``_target_``; its signature is their schema.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf

from ssd_train.cache.shards import SECRET, SECRETS_MEND, CacheDtype, place
from ssd_train.decoding import phrases
from ssd_train.heads.corrector import CorrectorSpec


class Stage(Enum):
    plan = "plan"
    cache = "cache"
    train = "train"
    export = "export"
    decode = "decode"
    phrases = "phrases"
    benchmark = "benchmark"
    evaluate = "evaluate"


class CacheSource(Enum):
    generated = "generated"
    images = "images"


class Space(Enum):
    latent = "latent"
    token = "token"


class Strategy(Enum):
    ddp = "ddp"
    fsdp = "fsdp"


class WeightDtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class CacheConfig:
    # A directory, or a URL to read a finished one from; default: runs/cache/<model>-<fingerprint of its settings>
    dir: str | None = None
    source: CacheSource = CacheSource.generated
    samples: int = 512
    shard_size: int = 64
    batch_size: int = 64  # part of a shard's definition: another one alters rounding, never the draws
    dtype: CacheDtype = CacheDtype.bfloat16
    # What draws, of decoder=[...]; an exact one, with the heads of decode.heads. Default: token by token
    decoder: str | None = None
    verify: bool = True  # hash every shard that is already there, not just its size


@dataclass
class PhrasesConfig:
    merges: int = 8000  # the most phrases to learn
    path: str = "${cache_dir:}/phrases-${phrases.merges}-of-${cache.samples}.json"  # a file


@dataclass
class LossConfig:
    """Weights; a term of weight 0 costs nothing."""

    smooth_l1: float = 1.0
    total_variation: float = 0.0
    kl: float = 0.0


@dataclass
class CorrectorConfig:
    """A training step's pairs come from as many images of the batch as hold them, each fed once more."""

    width: int = 512
    depth: int = 1
    context: int = 5  # how many of the nearest neighbours that come before a position it sees
    pairs: int = 512  # a step, at most
    loss: LossConfig = field(default_factory=lambda: LossConfig(kl=0.05))


@dataclass
class HeadConfig:
    k_horizontal: int = 5
    k_vertical: int = 5
    hidden: int | None = None  # 2 * width of the backbone
    space: Space = Space.latent
    context: int = 1  # neighbours in the row above that a vertical head sees; odd
    corrector: CorrectorConfig | None = field(default_factory=CorrectorConfig)  # null: none
    loss: LossConfig = field(default_factory=LossConfig)
    condition_drop: float = 0.1  # share of samples trained on their unconditional stream
    lr: float = 1e-4
    min_lr: float = 1e-5
    warmup_steps: int = 20
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    ema: float | None = None  # decay, e.g. 0.999; the averaged weights are the ones exported


@dataclass
class TrainConfig:
    epochs: float = 3
    batch_size: int = 32
    precision: str = "32-true"
    # Of several processes: each holds all heads, or with fsdp, for wide ones, its part of each head and its optimiser
    strategy: Strategy = Strategy.ddp
    gradient_clip: float = 1.0
    workers: int = 1  # also decides the order of samples
    shuffle_buffer: int = 256  # samples
    validate_every: int = 200  # steps; and once at the end
    validation_samples: int = 64
    checkpoint_every: int = 200  # steps
    trainer: dict[str, Any] = field(default_factory=dict)  # anything else for lightning's Trainer


@dataclass
class ExportConfig:
    dtype: WeightDtype = WeightDtype.float32  # as stored; heads are cast to their backbone's


@dataclass
class DecodeConfig:
    heads: str | None = None  # a directory, or owner/name[@revision] on the hub; default: this run's export
    prompts: int = 128  # fidelity
    batch_size: int = 32
    timed_images: int = 5  # wall-clock, at batch 1, after one warm-up
    pictures: int = 6
    vary: list[str] = field(default_factory=list)  # extra decoders, e.g. ["ssd.schedule.rounds=0,1,3"]


@dataclass
class Config:
    model: Any = MISSING
    stages: list[Stage] = field(default_factory=lambda: [Stage.cache, Stage.train, Stage.export, Stage.decode])
    cache: CacheConfig = field(default_factory=CacheConfig)
    phrases: PhrasesConfig = field(default_factory=PhrasesConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    decoder: dict[str, Any] = field(default_factory=dict)
    suite: Any = None  # of the evaluate stage
    logger: Any = None
    seed: int = 0
    device: str = "auto"
    threads: int | None = None  # CPU threads of torch; null leaves torch's choice
    output: str = MISSING
    note: str | None = None  # stands in the report


def register() -> None:
    """Makes the schema and resolvers known to Hydra. ``${shipped:tiny}`` is a folder that comes with the project,
    ``${cache_dir:}`` where this run's cache lies."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("shipped", lambda name: str(data_dir() / name), replace=True)
    OmegaConf.register_new_resolver("folder", _folder, replace=True)
    OmegaConf.register_new_resolver("cache_dir", _cache_dir, replace=True)


def compose(overrides: Sequence[str]) -> Config:
    """The configuration that a command line of these overrides has. Raises ValueError if there is none."""
    register()
    explain_typos(overrides)
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return hydra.compose("config", list(overrides))
    except HydraException as error:
        raise ValueError(" ".join(str(error).split())) from error


def cache_fingerprint(cfg: Config) -> str:
    """Of everything that decides what is in a cache, but for how many samples there are."""
    model = (cfg.model[key] for key in ("name", "backbone", "sampling", "prompts"))
    cache = {k: str(v) for k, v in cfg.cache.items() if k not in ("dir", "samples", "verify", "decoder")}
    decoder = [cfg.decoder[cfg.cache.decoder], cfg.decode.heads] if cfg.cache.decoder else []
    return fingerprint(*model, cache, cfg.seed, *decoder)


def cache_dir(cfg: Config) -> Path | str:
    """Where a run's cache lies; a URL only if cache.dir is one."""
    if cfg.cache.dir:
        return place(cfg.cache.dir)
    return Path("runs/cache") / f"{cfg.model.name}-{cache_fingerprint(cfg)}"


def corrector_spec(head: HeadConfig) -> CorrectorSpec | None:
    corrector = head.corrector
    return corrector and CorrectorSpec(corrector.width, corrector.depth, corrector.context)


def _cache_dir(*, _root_: DictConfig) -> str:
    return str(cache_dir(_root_))


def _folder(overrides: str) -> str:
    """A sweep's overrides as the name of one folder, not too long for a file system."""
    name = overrides.replace("/", "_")
    return name if len(name) <= 200 else f"{name[:180]}...{fingerprint(name)}"


def _packaged(name: str) -> Path:
    """A top-level folder of the project: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    inside, beside = package / name, package.parent / name
    if inside.is_dir():
        return inside
    if beside.is_dir():
        return beside
    raise FileNotFoundError(f"{name}/ is neither in {package} nor beside it: the installation is incomplete")


def conf_dir() -> Path:
    return _packaged("conf")


def data_dir() -> Path:
    return _packaged("data")


def explain_typos(overrides: Sequence[str]) -> None:
    """Raises ValueError for a command-line override of a setting that the schema does not have, with those that it
    has: Hydra's own message does not list them."""
    groups = {"hydra", *(path.name for path in conf_dir().iterdir() if path.is_dir())}
    for override in overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        if SECRET.search(value):  # before Hydra writes its files
            raise ValueError(f"{key} is a URL with {SECRETS_MEND}")
        parts = key.split(".")
        if not equals or not all(part.isidentifier() for part in parts) or parts[0] in groups - {"head"}:
            continue
        node = OmegaConf.structured(Config)
        for i, part in enumerate(parts):
            if not isinstance(node, DictConfig) or not is_dataclass(OmegaConf.get_type(node)):
                break  # pluggable: its target knows
            if part not in list(node):  # "in node" is False for a value that is still missing
                near = "".join(f"did you mean {name}? " for name in get_close_matches(part, node, 1))
                where = ".".join(parts[:i]) or "the configuration"
                raise ValueError(f"{override}: {where} has no setting {part}; {near}There are {', '.join(node)}.")
            node = node._get_node(part)


def choices(group: str) -> list[str]:
    """The yamls of a config group."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def fingerprint(*nodes: Any) -> str:
    """16 hex digits that identify configuration values."""

    def plain(node: Any) -> Any:
        if isinstance(node, DictConfig | ListConfig):
            node = OmegaConf.to_container(node, resolve=True, enum_to_str=True)
        return node

    return hashlib.sha256(json.dumps([plain(n) for n in nodes], sort_keys=True).encode()).hexdigest()[:16]


LEAST = {
    "cache.samples": 1,
    "cache.shard_size": 1,
    "cache.batch_size": 1,
    "phrases.merges": 1,
    "train.batch_size": 1,
    "train.workers": 0,
    "train.shuffle_buffer": 0,
    "train.gradient_clip": 0,
    "train.validate_every": 1,
    "train.validation_samples": 1,
    "train.checkpoint_every": 1,
    "decode.prompts": 1,
    "decode.batch_size": 1,
    "decode.timed_images": 1,
    "decode.pictures": 0,
    "head.k_horizontal": 0,
    "head.k_vertical": 0,
    "head.hidden": 1,
    "head.warmup_steps": 0,
    "head.weight_decay": 0,
    **{f"head.{of}loss.{term}": 0 for of in ("", "corrector.") for term in ("smooth_l1", "total_variation", "kl")},
    **{f"head.corrector.{setting}": 1 for setting in ("width", "depth", "context", "pairs")},
    "threads": 1,
    "suite.images_per_prompt": 1,
    "suite.limit": 1,
}


def check(cfg: Config) -> None:
    """What is wrong whatever the model. Raises ValueError with the value and the mend."""
    for name, least in LEAST.items():
        value = OmegaConf.select(cfg, name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")
    if cfg.cache.dir is not None:
        place(cfg.cache.dir)
    if not cfg.output.strip() or cfg.cache.dir == "":
        raise ValueError(f"output={cfg.output!r}, cache.dir={cfg.cache.dir!r}; expected folders")
    if not cfg.stages:
        raise ValueError(f"stages is empty; expected some of {[stage.name for stage in Stage]}")
    if cfg.head.k_horizontal + cfg.head.k_vertical == 0:
        raise ValueError("head.k_horizontal and head.k_vertical are both 0; expected at least one head")
    if cfg.head.context < 1 or cfg.head.context % 2 == 0:
        raise ValueError(f"head.context is {cfg.head.context}; expected an odd number of neighbours, 1 or more")
    if cfg.head.space is Space.token and (cfg.head.loss.kl or cfg.head.loss.total_variation):
        raise ValueError(
            f"head.loss.kl={cfg.head.loss.kl}, head.loss.total_variation={cfg.head.loss.total_variation} with "
            "head.space=token, whose only loss is cross-entropy; expected 0, or head.space=latent"
        )
    if cfg.head.context > 1 and not cfg.head.k_vertical:
        raise ValueError(
            f"head.context={cfg.head.context} is for vertical heads, and head.k_vertical is 0; expected "
            "head.context=1 or head.k_vertical=1"
        )
    if not 0 <= cfg.head.condition_drop <= 1:
        raise ValueError(f"head.condition_drop is {cfg.head.condition_drop}; expected a share between 0 and 1")
    if not 0 < cfg.head.min_lr <= cfg.head.lr:
        raise ValueError(f"head.min_lr={cfg.head.min_lr}, head.lr={cfg.head.lr}; expected 0 < min_lr <= lr")
    if len(cfg.head.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.head.betas):
        raise ValueError(f"head.betas is {cfg.head.betas}; expected two numbers in [0, 1)")
    if cfg.head.ema is not None and not 0 < cfg.head.ema < 1:
        raise ValueError(f"head.ema is {cfg.head.ema}; expected a decay between 0 and 1, or null for none")
    if cfg.train.epochs <= 0:
        raise ValueError(f"train.epochs is {cfg.train.epochs}; expected more than 0")
    for name in "head.loss", "head.corrector.loss":
        weights = OmegaConf.select(cfg, name)
        if weights is not None and not any(weights.values()):
            raise ValueError(f"every weight in {name} is 0; expected at least one above 0")
    if cfg.cache.decoder is not None and cfg.cache.decoder not in cfg.decoder:
        raise ValueError(
            f"cache.decoder is {cfg.cache.decoder}; expected one of decoder={sorted(cfg.decoder)}, or add it there"
        )
    if cfg.cache.decoder is not None and cfg.cache.source is CacheSource.images:
        raise ValueError(
            f"cache.decoder is {cfg.cache.decoder}, but cache.source=images draws nothing; expected cache.decoder=null"
        )
    for variation in cfg.decode.vary:
        if variation.split(".")[0] not in cfg.decoder or "=" not in variation:
            raise ValueError(
                f"decode.vary holds {variation!r}; expected <decoder>.<setting>=<value>,<value>... with a decoder of "
                f"{sorted(cfg.decoder)}"
            )
    if Stage.evaluate in cfg.stages and (cfg.suite is None or OmegaConf.is_missing(cfg.suite, "path")):
        raise ValueError(
            f"stages holds evaluate, which needs +suite=<name>, one of {', '.join(choices('suite'))}, and suite.path, "
            "where its official prompts are"
        )
    decodes = {Stage.decode, Stage.benchmark, Stage.evaluate}.intersection(cfg.stages)
    if decodes and Stage.train in cfg.stages and cfg.head.corrector is None and not cfg.decode.heads:
        for name, node in cfg.decoder.items():
            if (node.get("drafter") or {}).get("sweeps"):
                raise ValueError(
                    f"decoder {name} corrects drafts, and head.corrector is null; expected {name}.drafter.sweeps=0, "
                    "other decoders, or a corrector"
                )
    device(cfg)
    if {Stage.decode, Stage.benchmark, Stage.evaluate} & set(cfg.stages) and Stage.phrases not in cfg.stages:
        for name in cfg.decoder:
            library = (cfg.decoder[name].get("rule") or {}).get("library")
            if isinstance(library, str):
                try:
                    phrases.load(Path(library))
                except phrases.PhrasesError as error:
                    raise ValueError(f"decoder {name}: {error}") from error


def device(cfg: Config, local_rank: int = 0) -> torch.device:
    """The configured device; of several GPUs the process's own. Raises ValueError if it is not there."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if cfg.device == "auto" else cfg.device
    try:
        wanted = torch.device(f"cuda:{local_rank}" if name == "cuda" and local_rank else name)
    except RuntimeError as error:
        raise ValueError(f"device is {cfg.device!r}; expected auto, cpu, cuda or cuda:<number>") from error
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={cfg.device}, but torch {torch.__version__} finds no CUDA device; use device=cpu or device=auto"
        )
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"this process wants {wanted}, but sees {torch.cuda.device_count()} CUDA device(s); expected one a process "
            "of the node, all of them visible to each (with SLURM --gres=gpu:N, not --gpus-per-task)"
        )
    return wanted
