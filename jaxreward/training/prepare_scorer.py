"""Gets the scorer that an experiment asks for: trained here (Stage 1), shipped, random, or from a path."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxreward.checkpoints.pretrained import (
    load_pretrained,
    load_scorer,
    pretrained_model,
    save_scorer,
)
from jaxreward.checkpoints.store import CheckpointStore
from jaxreward.data.video import Crop, VideoOptions, VideoSet, read_folder
from jaxreward.envs.catrap.environment import CatrapConfig
from jaxreward.envs.catrap.levels import level_names, load_level
from jaxreward.envs.pyboy import CartridgeConfig
from jaxreward.errors import ConfigError, DataError, ModelError, StorageError
from jaxreward.files import write_atomically
from jaxreward.models import lora
from jaxreward.models.frame_ranker import FrameRankerConfig
from jaxreward.scorers.base import Scorer
from jaxreward.scorers.chat_model import ChatModel
from jaxreward.scorers.compact_ranker import CompactRanker
from jaxreward.scorers.vlm_ranker import VLMRanker
from jaxreward.training.act import Interrupted
from jaxreward.training.demonstrate import DemonstrateConfig, demonstrate
from jaxreward.training.rank import (
    RankState,
    Videos,
    init_rank_state,
    plot_transfer_matrix,
    train_ranker,
    transfer_matrix,
)
from jaxreward.training.rank_vlm import VLMRankState, VLMRankTrainer, train_vlm_ranker
from jaxreward.training.run_folder import RunFolder
from jaxreward.types import PyTree

PREFLIGHT_CLIPS = 32
TRANSFER_FILE, TRANSFER_PICTURE = "transfer.json", "transfer.png"


@dataclasses.dataclass(frozen=True)
class VideoConfig:
    """Where Stage 1's videos come from and how they are read.

    Attributes:
      folders: folders of expert videos. Empty: expert play is generated and recorded into the run
        folder first (Catrap only).
      weights: how often each folder is drawn from; empty means equally.
      crop: pixels that are cut from each side before resizing to the scorer's frame.
      stride: keep every stride-th frame.
      duplicate_tolerance: greatest difference of any pixel at which neighbouring frames count as equal
        and the later one is dropped.
      on_bad: 'skip' reports unusable files and goes on, 'refuse' ends the run.
      held_out: share of the videos that Stage 1 does not train on.
      levels: levels whose expert play is generated; empty means the level that is acted on.
      held_out_levels: levels whose videos only validate, never train; a training level among them is
        left out.
      count: generated videos for each level.
      kind: which expert plays them.
      transfer: levels of the transfer matrix (RTA, figure 2): one scorer is trained on each and judged on
        all, into transfer.json and transfer.png of the run folder; empty for none.
    """

    folders: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    crop: Crop = dataclasses.field(default_factory=Crop)
    stride: int = 1
    duplicate_tolerance: int = 0
    on_bad: Literal["skip", "refuse"] = "skip"
    held_out: float = 0.2
    levels: tuple[str, ...] = ()
    held_out_levels: tuple[str, ...] = ()
    count: int = 96
    kind: Literal["mixed", "optimal", "near_optimal", "dithering"] = "mixed"
    transfer: tuple[str, ...] = ()

    def __post_init__(self):
        """Checks the ranges; raises ConfigError."""
        for field, least in (("stride", 1), ("duplicate_tolerance", 0), ("count", 1)):
            found = getattr(self, field)
            if found < least:
                raise ConfigError(f"videos.{field} is {found}; expected at least {least}")
        if not 0.0 <= self.held_out < 1.0:
            raise ConfigError(f"videos.held_out is {self.held_out}; expected a share in [0, 1)")


@dataclasses.dataclass(frozen=True)
class PreparedScorer:
    """A scorer that is ready to judge.

    Attributes:
      scorer: the scorer.
      params: its parameters.
      context: what its `prepare` returned for the task.
      clips: held-out expert videos of the task, (uint8 [V, S, H, W, C], lengths int32 [V]); None if the
        run has no videos.
      heldout: {set: rho} on held-out videos and on held-out levels.
    """

    scorer: Scorer
    params: PyTree
    context: PyTree
    clips: tuple[np.ndarray, np.ndarray] | None
    heldout: dict[str, float]

    @property
    def heldout_rho(self) -> float | None:
        """Spearman's rho of progress with time on held-out videos of the training levels."""
        return self.heldout.get("videos")


def prepare_scorer(
    config, environment, run: RunFolder, console: Console, interrupted: Callable[[], bool]
) -> PreparedScorer:
    """Loads or trains the scorer of an experiment.

    Args:
      config: an ExperimentConfig.
      environment: its environment: the scorer's frames have the size of its pictures.
      run: the run folder; a scorer that was trained there before is loaded.
      console: where progress is printed.
      interrupted: asked between training steps.

    Raises:
      ConfigError: there are no videos to train from and none can be generated.
      DataError: the videos cannot be used.
      ModelError: a scorer file is damaged or does not fit.
      Interrupted: after saving.
    """
    untrained = config.scorer == "train" and not _own_scorer(run).exists()
    sets = {}
    if untrained or config.preflight:
        sets = read_videos(config, environment, run, console, interrupted)
    if untrained:
        if "train" not in sets:
            raise ConfigError(
                "scorer is 'train' and there are no videos to train it from: give --videos DIR, or take a "
                "ready scorer by --scorer pretrained or --scorer PATH"
            )
        if config.vlm.model:
            _train_vlm(config, environment.spec.task, sets, run, console, interrupted)
        else:
            _train(config, environment.spec.image_shape, sets, run, console, interrupted)
    if config.videos.transfer and not (run.path / TRANSFER_FILE).exists():
        _measure_transfer(config, environment, run, console, interrupted)
    prepared = load_prepared(config, environment, run)
    if "task" not in sets:
        return prepared
    frames, lengths, _ = sets["task"].padded()
    return dataclasses.replace(prepared, clips=(frames[:PREFLIGHT_CLIPS], lengths[:PREFLIGHT_CLIPS]))


def load_prepared(config, environment, run: RunFolder) -> PreparedScorer:
    """Loads the scorer of an experiment, which must have been trained already; without any clips.

    Raises:
      ModelError: a scorer file is missing or damaged or does not fit.
    """
    spec, heldout = environment.spec, {}
    if (folder := vlm_folder(config, run)) is not None:
        scorer = _load_vlm(config, folder)
        params = scorer.chat_model.model.params
        if (adapter := _adapter_folder(config, run)) is not None:
            found, lora_config = lora.load(adapter, scorer.chat_model.model.architecture)
            params = {**params, **lora.collection(found, lora_config)}
            heldout = _read_card(adapter)["heldout"]
        return PreparedScorer(scorer, params, scorer.prepare(params, spec.task), None, heldout)
    if config.scorer == "train":
        model, params, card = load_scorer(_own_scorer(run))
        heldout = card["metadata"]["heldout"]
    elif config.scorer == "pretrained":
        model, params, _ = load_pretrained()
    elif config.scorer == "untrained":
        model = dataclasses.replace(config.model, frame_shape=spec.image_shape[:2])
        shape = (*spec.image_shape[:2], model.channels)
        params = CompactRanker(model).init(jax.random.fold_in(jax.random.key(config.seed), 3), shape)
    else:
        path = pathlib.Path(config.scorer)
        model, params, card = load_scorer(path / "scorer" if (path / "scorer").is_dir() else path)
        heldout = card["metadata"].get("heldout", {})
    scorer = CompactRanker(model)
    return PreparedScorer(scorer, params, scorer.prepare(params, spec.task), None, heldout)


def vlm_folder(config, run: RunFolder) -> pathlib.Path | None:
    """The folder of the vision-language model that an experiment's scorer is, adapted or not; None if none.

    Raises:
      ModelError: an adapter that does not say of which model it is.
    """
    if config.scorer == "train":
        return pretrained_model(config.vlm.model) if config.vlm.model else None
    if is_model_folder(config.scorer):
        return pathlib.Path(config.scorer)
    adapter = _adapter_folder(config, run)
    return None if adapter is None else pretrained_model(_read_card(adapter)["model"])


def is_model_folder(path: str) -> bool:
    """Whether a path is a Hugging Face folder: its config.json names a `model_type`, as no run's does."""
    try:
        return "model_type" in json.loads((pathlib.Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _adapter_folder(config, run: RunFolder) -> pathlib.Path | None:
    """The folder of the LoRA that the experiment's scorer has or will have; None for other scorers."""
    if config.scorer == "train":
        return run.path / "scorer" if config.vlm.model else None
    path = pathlib.Path(config.scorer)
    for folder in (path / "scorer", path):
        if (folder / lora.CONFIG_FILE).exists():
            return folder
    return None


def _read_card(folder: pathlib.Path) -> dict[str, Any]:
    """What Stage 1 wrote beside an adapter: the model's folder or name, held-out rho, settings."""
    file = folder / "scorer.json"
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
        if not (isinstance(card["model"], str) and isinstance(card["heldout"], dict)):
            raise ValueError("'model' is no text or 'heldout' no object")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{file}: it cannot be read ({error}); expected what Stage 1 writes beside an adapter"
        ) from error
    return card


def _load_vlm(config, folder: pathlib.Path) -> VLMRanker:
    """Loads the model and says how it is asked."""
    chat_model = ChatModel.load(folder, dtype=config.vlm.dtype, cached_frames=config.vlm.cached_frames)
    return VLMRanker(chat_model, config.vlm)


def _own_scorer(run: RunFolder) -> pathlib.Path:
    return run.path / "scorer" / "scorer.json"


def read_videos(
    config, environment, run: RunFolder, console: Console, interrupted: Callable[[], bool]
) -> dict[str, VideoSet]:
    """Reads (or first generates) the experiment's videos.

    Returns:
      Sets by name: 'train', 'videos' (held out, of the same folders), 'levels' (of held-out levels), 'level
      NAME' (of each of them) and 'task' (held out, of the task that is acted on; of all folders where folders
      are given); without those that are empty.
    """
    videos = config.videos
    options = _reading(config, environment)
    if videos.folders:
        found = _read(list(videos.folders), videos.weights, options, console)
        train, held_out = found.split(videos.held_out, config.seed)
        return _filled({"train": train, "videos": held_out, "task": held_out}, console)
    acted = _acted_levels(config.env)
    if not acted:
        return {}
    training = config.scorer == "train"
    train_levels, acted = _different((training and videos.levels) or acted), _different(acted)
    held_out_levels = []
    if training:
        held_out_levels = _different((*train_levels, *videos.held_out_levels))[len(train_levels) :]
    wanted = _different((*train_levels, *held_out_levels, *acted))
    folders = _record_demonstrations(config, wanted, run, console, interrupted)
    short = dataclasses.replace(options, min_frames=2)

    def of(names: Iterable[str]) -> list[pathlib.Path]:
        return [folders[load_level(name).name] for name in names]

    train, held_out = _read(of(train_levels), (), short, console).split(videos.held_out, config.seed)
    sets = {"train": train, "videos": held_out}
    if held_out_levels:
        sets["levels"] = _read(of(held_out_levels), (), short, console)
        for name in held_out_levels:
            sets[f"level {load_level(name).name}"] = _read(of([name]), (), short, console)
    _, sets["task"] = _read(of(acted), (), short, console).split(videos.held_out, config.seed)
    return _filled(sets, console)


def _measure_transfer(
    config, environment, run: RunFolder, console: Console, interrupted: Callable[[], bool]
) -> None:
    """Trains a scorer on each level of `videos.transfer` and judges it on all; writes table and picture."""
    names = _different(config.videos.transfer)
    folders = _record_demonstrations(config, names, run, console, interrupted)
    options = dataclasses.replace(_reading(config, environment), min_frames=2)
    split = {
        name: _read([folder], (), options, console).split(config.videos.held_out, config.seed)
        for name, folder in folders.items()
    }
    if not all(held_out.videos for _, held_out in split.values()):
        raise ConfigError(
            f"videos.held_out {config.videos.held_out} of {config.videos.count} videos found, which leaves "
            "none to judge the transfer on; raise videos.held_out or videos.count"
        )
    names = list(split)
    heldout = {name: Videos(*held_out.padded()) for name, (_, held_out) in split.items()}
    model = dataclasses.replace(config.model, frame_shape=tuple(environment.spec.image_shape[:2]))
    train_key, key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), 5))
    scorers = {}

    def callback(state: RankState, record: dict[str, float]) -> None:
        if interrupted():
            raise Interrupted

    for number, name in enumerate(names):
        console.print(f"transfer: Stage 1 on level {name}, {number + 1} of {len(names)}")
        kept = run.path / "transfer" / name
        if not (kept / "scorer.json").exists():
            train, own_key = Videos(*split[name][0].padded()), jax.random.fold_in(train_key, number)
            result = train_ranker(config.rank, model, train, {}, own_key, callback)
            save_scorer(kept, model, result.params, {"level": name, "seed": config.seed})
        scorers[name] = (CompactRanker(model), load_scorer(kept)[1])
    matrix = transfer_matrix(
        scorers, heldout, key, clips=config.rank.evaluation_clips, clip_config=config.rank.clips
    )
    plot_transfer_matrix(matrix, names, names, run.path / TRANSFER_PICTURE)
    rows = {
        row: dict(zip(names, map(float, values), strict=True))
        for row, values in zip(names, matrix, strict=True)
    }
    run.write_json(TRANSFER_FILE, {"trained_on": rows})
    others = matrix[~np.eye(len(names), dtype=bool)]
    off_diagonal = f", {others.mean():.3f} on the others" if others.size else ""
    console.print(f"transfer: mean rho {np.diag(matrix).mean():.3f} on a scorer's own level{off_diagonal}")


def _acted_levels(env_config) -> tuple[str, ...]:
    """The Catrap levels that an environment plays; none for other environments and for a user's ROM."""
    if not isinstance(env_config, CatrapConfig | CartridgeConfig) or getattr(env_config, "rom", ""):
        return ()
    if env_config.level.strip() == "all":
        return level_names()
    return tuple(name.strip() for name in env_config.level.split(","))


def _record_demonstrations(
    config, levels: list[str], run: RunFolder, console: Console, interrupted: Callable[[], bool]
) -> dict[str, pathlib.Path]:
    """Records expert videos of levels into the run folder; returns the folder of each level's name."""
    started = time.perf_counter()

    def progress(ready: int, total: int) -> None:
        if interrupted():
            raise Interrupted

    folders, recorded = {}, 0
    for level in levels:
        asked = DemonstrateConfig(
            out=run.demonstrations,
            level=level,
            count=config.videos.count,
            kind=config.videos.kind,
            seed=config.seed,
            backend="jax" if isinstance(config.env, CatrapConfig) else "cartridge",
            max_length=config.env.max_episode_steps,
        )
        try:
            made = demonstrate(asked, progress)
        except DataError as error:
            if level in config.videos.held_out_levels:
                raise DataError(f"videos.held_out_levels: {error}") from error
            raise
        folders[load_level(level).name] = run.demonstrations / pathlib.Path(made.videos[0].file).parent
        recorded += made.recorded
    seconds = time.perf_counter() - started
    console.print(f"recorded {recorded} expert videos of {len(levels)} levels in {seconds:.1f} s")
    return folders


def _filled(sets: dict[str, VideoSet], console: Console) -> dict[str, VideoSet]:
    """The sets that hold videos: a single video leaves none to hold out."""
    if not sets["task"].videos:
        console.print("no video is held out: there is no held-out rho and no preflight")
    return {name: videos for name, videos in sets.items() if videos.videos}


def _different(names: Iterable[str]) -> list[str]:
    """The names of levels, each level once.

    Raises:
      ConfigError: two different levels have one name, and their videos would share a folder.
    """
    found: dict[str, tuple[str, np.ndarray]] = {}
    for name in names:
        level = load_level(name)
        first, cells = found.setdefault(level.name, (name, level.cells))
        if (cells != level.cells).any():
            raise ConfigError(
                f"'{first}' and '{name}' are different levels with the name '{level.name}'; rename one "
                "of the files"
            )
    return [name for name, _ in found.values()]


def _reading(config, environment) -> VideoOptions:
    """How videos are read, for a scorer whose frames have the size of the environment's pictures."""
    videos, clips = config.videos, (config.vlm_rank if config.vlm.model else config.rank).clips
    return VideoOptions(
        crop=videos.crop,
        size=tuple(environment.spec.image_shape[:2]),
        grey=config.model.channels == 1 and not config.vlm.model,
        stride=videos.stride,
        duplicate_tolerance=videos.duplicate_tolerance,
        on_bad=videos.on_bad,
        min_frames=clips.length if config.scorer == "train" else 2,
    )


def _read(folders: list, weights: tuple, options: VideoOptions, console: Console) -> VideoSet:
    found = read_folder(folders, list(weights) or None, options)
    for bad in found.bad:
        console.print(f"[yellow]skipped[/yellow] {bad.path}: {bad.reason}")
    if found.dropped_static:
        console.print(f"dropped {found.dropped_static} static or duplicate frames")
    return found


def _train(config, image_shape, sets, run: RunFolder, console: Console, interrupted) -> None:
    """Stage 1; saves the scorer into the run folder."""
    started = time.perf_counter()
    model: FrameRankerConfig = dataclasses.replace(config.model, frame_shape=tuple(image_shape[:2]))
    store = CheckpointStore(run.checkpoints / "rank", keep=1)
    train = Videos(*sets["train"].padded())
    heldout = {name: Videos(*sets[name].padded()) for name in sets if name not in ("train", "task")}
    count = len(sets["train"].videos)
    init_key, train_key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), 4))
    state = None
    if store.latest_step() is not None:
        abstract = jax.eval_shape(lambda: init_rank_state(config.rank, model, init_key))
        state, _ = store.restore(abstract)
    console.print(f"Stage 1 (rank): {config.rank.steps} steps on {count} videos")

    def callback(state: RankState, record: dict[str, float]) -> None:
        step, elapsed = int(record["step"]), time.perf_counter() - started
        shown = ", ".join(
            f"{k.removeprefix('rho/')} {v:.3f}" for k, v in record.items() if k.startswith("rho/")
        )
        console.print(
            f"  step {step}/{config.rank.steps}  reward {record['reward']:.3f}  held-out rho: {shown}  "
            f"{elapsed:.0f} s"
        )
        store.save(step, state, {"step": step, "rho": record})
        if interrupted():
            raise Interrupted

    result = train_ranker(config.rank, model, train, heldout, train_key, callback, state=state)
    rho = result.heldout_rho or {
        name.removeprefix("rho/"): value
        for name, value in store.read_metadata()["rho"].items()
        if name.startswith("rho/")
    }
    metadata: dict[str, Any] = {
        "heldout": rho,
        "steps": config.rank.steps,
        "objective": config.rank.objective,
        "videos": count,
        "seed": config.seed,
        "seconds": time.perf_counter() - started,
    }
    save_scorer(run.path / "scorer", result.model, result.params, metadata)


def _train_vlm(config, task: str, sets, run: RunFolder, console: Console, interrupted) -> None:
    """Stage 1 on a vision-language model; saves its adapter into the run folder."""
    settings = config.vlm_rank
    ranker = _load_vlm(config, pretrained_model(config.vlm.model))
    store = CheckpointStore(run.checkpoints / "rank", keep=1)
    train = Videos(*sets["train"].padded())
    heldout = {name: Videos(*sets[name].padded()) for name in sets if name not in ("train", "task")}
    init_key, train_key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), 4))
    trainer = VLMRankTrainer(settings, ranker, task)
    state, saved = None, {"step": -1, "rho": {}, "seconds": 0.0}
    if store.latest_step() is not None:
        state, saved = store.restore(jax.eval_shape(lambda: trainer.init(init_key)))
    started = time.perf_counter() - saved["seconds"]
    console.print(
        f"Stage 1 (rank): {settings.format_steps} steps on the format and {settings.steps} updates of "
        f"{settings.batch_size} x {settings.group_size} answers, on {len(sets['train'].videos)} videos; "
        f"{lora.count(trainer.init(init_key).learner.adapter):,} parameters of {config.vlm.model} are trained"
    )
    samples_file = run.path / "rank_samples.jsonl"

    def save(state: VLMRankState) -> None:
        saved.update(step=int(state.step), seconds=time.perf_counter() - started)
        store.save(saved["step"], state, saved)

    def callback(state: VLMRankState, record: dict[str, float], samples: list[dict]) -> None:
        shown = ", ".join(
            f"{k.removeprefix('rho/')} {v:.3f}" for k, v in record.items() if k.startswith("rho/")
        )
        console.print(
            f"  step {int(state.step)}/{trainer.total_steps}  {_learnt(record)}held-out rho: {shown}  "
            f"{time.perf_counter() - started:.0f} s"
        )
        saved["rho"] = record
        save(state)
        _append(samples_file, [{"step": saved["step"], **sample} for sample in samples])
        _append(run.path / "rank_metrics.jsonl", [record | {"seconds": saved["seconds"]}])
        if interrupted():
            raise Interrupted

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("Stage 1", total=trainer.total_steps, completed=max(saved["step"], 0))

        def after_step(state: VLMRankState, metrics: dict[str, float]) -> None:
            progress.update(bar, description=_learnt(metrics).strip(), completed=int(state.step))
            if interrupted():
                save(state)
                raise Interrupted

        result = train_vlm_ranker(
            settings, ranker, train, heldout, train_key, callback,
            after_step=after_step, task=task, state=state, trainer=trainer,
        )  # fmt: skip
    rho = {k.removeprefix("rho/"): v for k, v in saved["rho"].items() if k.startswith("rho/")}
    folder = run.path / "scorer"
    if not (folder / lora.CONFIG_FILE).exists():
        lora.save(
            folder, result.adapter, settings.lora, ranker.chat_model.model.architecture,
            base_model=str(ranker.chat_model.model.path),
        )  # fmt: skip
    card = {
        "model": config.vlm.model,
        "heldout": rho,
        "steps": settings.steps,
        "videos": len(sets["train"].videos),
        "seed": config.seed,
        "seconds": time.perf_counter() - started,
    }
    write_atomically(folder / "scorer.json", json.dumps(card, indent=2) + "\n")


def _learnt(metrics: dict[str, float]) -> str:
    """What a step of Stage 1 says about learning; '' for the model as it came."""
    if "reward" in metrics:
        return f"reward {metrics['reward']:.3f}  parse failures {metrics['parse_failures']:.1%}  "
    if "format_loss" in metrics:
        return f"loss {metrics['format_loss']:.3f} nats a token  "
    return ""


def _append(file: pathlib.Path, rows: list[dict]) -> None:
    """Appends lines of JSON."""
    try:
        with file.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise StorageError(f"{file}: it cannot be written ({error.strerror})") from error
