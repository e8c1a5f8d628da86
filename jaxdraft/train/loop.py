"""Training loops with progress, metrics, checkpoints and resuming."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxdraft.train.optimize import Metrics, TrainState

Step = Callable[[TrainState, Any, jax.Array], tuple[TrainState, Metrics]]


def fit(
    step: Step,
    state: TrainState,
    batches: Callable[[int], Any],
    *,
    steps: int,
    schedule: Callable[[int], float] = lambda step: 1.0,
    folder: str | Path | None = None,
    save_every: int = 100,
    log_every: int = 20,
    name: str = "train",
    progress: bool = True,
) -> TrainState:
    """Train until ``steps`` steps were taken, from the newest checkpoint if there is one.

    A stopped run continues from its last checkpoint and ends with the same arrays as an
    uninterrupted run: batches and schedule are functions of the step, and the state is complete.

    Args:
      step: from :func:`jaxdraft.train.optimize.make_step`.
      state: initial state if there is no checkpoint. Donated: do not use it again.
      batches: step number -> batch.
      steps: number of steps of the whole run.
      schedule: step number -> scale of the update.
      folder: folder of checkpoints and ``metrics.jsonl``; None: neither is written.
      save_every: steps between checkpoints; the last step is always saved.
      log_every: steps between lines of metrics, which are means over these steps.
      name: label of the progress bar.
      progress: whether to show a bar.

    Returns:
      The state after ``steps`` steps.
    """
    from tqdm import tqdm

    with Checkpoints(folder) as saved:
        state = saved.newest(state)
        first = int(state.step)
        sums: list[Metrics] = []
        bar = tqdm(range(first, steps), initial=first, total=steps, desc=name, disable=not progress)
        for number in bar:
            rate = jnp.asarray(schedule(number), jnp.float32)
            state, metrics = step(state, batches(number), rate)
            sums.append(metrics)
            done = number + 1
            if done % log_every == 0 or done == steps:
                means = mean_metrics(sums)
                sums = []
                shown = {k: f"{v:.3f}" for k, v in means.items() if np.ndim(v) == 0}
                bar.set_postfix(shown)
                if folder is not None:
                    line = {"step": done, "rate": float(rate), **means}
                    with open(Path(folder) / "metrics.jsonl", "a", encoding="utf-8") as log:
                        log.write(json.dumps(line) + "\n")
            if done % save_every == 0 or done == steps:
                saved.save(state)
        return state


def mean_metrics(sums: list[Metrics]) -> dict[str, Any]:
    """Return means over steps, as Python numbers and lists."""
    host = jax.device_get(sums)
    return {
        key: np.round(np.mean([m[key] for m in host], axis=0, dtype=np.float64), 6).tolist()
        for key in host[0]
    }


class Checkpoints:
    """The newest two training states of a run, in a folder of orbax; no folder, no states."""

    def __init__(self, folder: str | Path | None):
        self.manager = None
        if folder is not None:
            import orbax.checkpoint as ocp

            options = ocp.CheckpointManagerOptions(
                max_to_keep=2, enable_async_checkpointing=False, create=True
            )
            self.manager = ocp.CheckpointManager(Path(folder).resolve(), options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        if self.manager is not None:
            self.manager.close()

    def newest(self, state: TrainState) -> TrainState:
        """Return the newest saved state, in the structure of ``state``; without one, ``state``."""
        if self.manager is None or self.manager.latest_step() is None:
            return state
        import orbax.checkpoint as ocp

        form = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        newest = self.manager.latest_step()
        return cast(TrainState, self.manager.restore(newest, args=ocp.args.StandardRestore(form)))

    def save(self, state: TrainState) -> None:
        """Write ``state``."""
        if self.manager is not None:
            import orbax.checkpoint as ocp

            self.manager.save(int(state.step), args=ocp.args.StandardSave(state))
