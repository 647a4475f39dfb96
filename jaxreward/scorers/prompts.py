"""What vision-language models are asked about frames.

The papers give the formats of the answers; the wording around them is ours, except TOPReward's statement and
what Robometer and RoboReward were trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxreward.models.tokenizer import Message

IMAGE = {"type": "image"}


def _shown(introduction: str, anchor: str, count: int, request: str) -> list[Message]:
    """One user turn: introduction, the anchor, the numbered frames, the request."""
    content: list[dict] = [_text(introduction + "\n\n" + anchor), IMAGE]
    for frame in range(1, count + 1):
        content += [_text(f"\nFrame {frame}:"), IMAGE]
    return [{"role": "user", "content": [*content, _text("\n\n" + request)]}]


def _text(text: str) -> dict:
    return {"type": "text", "text": text}


def rank_frames(task: str, count: int, *, describe: bool) -> list[Message]:
    """Asks for the progress ranks of shuffled frames (RTA, section 3.2).

    Args:
      task: the task sentence; may be empty.
      count: frames to rank, the anchor apart.
      describe: ask for a description of every frame before its rank, as the paper does; else for ranks alone,
        which are read as 'Frame i: Rank: p' and take a quarter of the tokens.

    Returns:
      One user turn with count + 1 images, the anchor first.
    """
    goal = f" The task: {task}" if task else ""
    introduction = (
        f"The pictures below are frames of one video of somebody who solves a task.{goal} The first picture "
        f"is the beginning of the video. The {count} numbered frames come later, in random order."
    )
    if describe:
        form = (
            "Frame i:\nFrame Description: one sentence on what this frame shows that tells how far the task "
            "is\nRank: p"
        )
    else:
        form = "Frame i: Rank: p"
    request = (
        f"For each of the {count} frames say how far the task has progressed in it: rank 1 is the earliest, "
        f"rank {count} the latest. Answer for every frame from 1 to {count}, and only in this form:\n{form}"
    )
    return _shown(introduction, "The beginning:", count, request)


def rank_answer(ranks: Sequence[int], *, description: str | Sequence[str] | None = None) -> str:
    """Writes an answer to `rank_frames`, as `parsing.parse_ranks` reads it.

    Args:
      ranks: of each frame, the anchor apart.
      description: in the form with descriptions, one for every frame, or one for each; None for ranks alone.

    Returns:
      The text, without a line break at its end.
    """
    if description is None:
        lines = [f"Frame {frame}: Rank: {rank}" for frame, rank in enumerate(ranks, 1)]
    else:
        each = [description] * len(ranks) if isinstance(description, str) else description
        lines = [
            f"Frame {frame}:\nFrame Description: {own}\nRank: {rank}"
            for frame, (own, rank) in enumerate(zip(each, ranks, strict=True), 1)
        ]
    return "\n".join(lines)


def percentages(task: str, count: int) -> list[Message]:
    """Asks for the completion percentages of shuffled frames (GVL, Ma et al., 2024, appendix A).

    Args:
      task: the task sentence.
      count: frames to judge, the anchor apart.

    Returns:
      One user turn with count + 1 images, the anchor, of 0 %, first.
    """
    introduction = (
        f"You judge how much of a task is done in frames of a video. The task: {task or 'not named'}. The "
        f"frames are shown in random order, so that a later frame need not show more progress. Give "
        "percentages between 0 and 100, where 100 is full completion."
    )
    request = (
        f"In the beginning, the task completion percentage is 0%. Now, for each of the {count} frames, in "
        "the order in which they are shown, describe the frame and give its percentage, in this form:\n"
        "Frame i:\nFrame Description: one sentence\nTask Completion Percentages: p%"
    )
    return _shown(introduction, "The beginning:", count, request)


def is_completed(task: str, count: int, *, robot: bool = False) -> list[Message]:
    """States that a video completes a task and asks whether that is true (TOPReward, arXiv:2602.19313).

    Args:
      task: the task sentence.
      count: frames of the video, in order.
      robot: say 'robot manipulation trajectory', as the paper, in place of 'trajectory'.

    Returns:
      One user turn with `count` images; the answer is the word 'True'.
    """
    kind = "robot manipulation trajectory" if robot else "trajectory"
    statement = (
        f"The above video shows a {kind} that completes the following task: {task} Decide whether the above "
        "statement is True or not. The answer is:"
    )
    return [{"role": "user", "content": [*[IMAGE] * count, _text(statement)]}]


def robometer_progress(task: str, count: int) -> list[Message]:
    """Asks Robometer for the progress at each frame, word for word as it was trained (arXiv:2603.02115).

    Args:
      task: the task sentence.
      count: frames of the video, in order.

    Returns:
      One user turn with `count` images, a progress token behind each.
    """
    request = (
        f"The task for the robot is '{task}'. Given the trajectory video, predict the task progress at each "
        "frame, how far along the robot is towards completing the task, a float between 0 and 1, where 0 is "
        "the starting state and 1 is when the task is completed. If the robot is not performing the same "
        "task, predict 0 progress."
    )
    return [{"role": "user", "content": [_text(request), *_judged(1, count)]}]


def robometer_preference(task: str, first: int, second: int, *, progress: bool = True) -> list[Message]:
    """Asks Robometer which of two videos is the better, word for word as it was trained.

    Args:
      task: the task sentence.
      first: frames of the first video.
      second: frames of the second video.
      progress: ask for progress, too: the authors' `predict_pref_progress`.

    Returns:
      One user turn with `first + second` images and the preference token at its end.
    """
    request = (
        f"Given these two trajectories for the task '{task}', evaluate which one makes more progress towards "
        "the task. Return A for the first trajectory and B for the second trajectory."
    )
    if progress:
        request += (
            " Also predict the task progress at each frame of the first trajectory, how far along the robot "
            "is towards completing the task, a float between 0 and 1, where 0 is the starting state and 1 is "
            "when the task is completed. If the robot is not performing the same task, predict 0 progress."
        )
    content = [
        _text(request + "This is Trajectory A. "),
        *_judged(1, first),
        {"type": "token", "token": "<|split_token|>"},
        _text("This is Trajectory B. "),
        *_judged(1 + first, second),
        _text("Now predict the preference between the two trajectories."),
        {"type": "token", "token": "<|pref_token|>"},
    ]
    return [{"role": "user", "content": content}]


def roboreward(task: str, slices: int) -> list[Message]:
    """Asks RoboReward for the score of a video's end, word for word as published (arXiv:2601.00675).

    Args:
      task: the task sentence.
      slices: of the video, two frames in each, one frame a second.

    Returns:
      One user turn: each slice behind its time, as Qwen3-VL writes videos, then the rubric.
    """
    request = (
        "Given the task, assign a discrete progress score reward (1,2,3,4,5) for the robot in the video in "
        "the format: ANSWER: <score>\n"
        "Rubric for end-of-episode progress (judge only the final state without time limits):\n"
        "1 - No Success: Final state shows no goal-relevant change for the command.\n"
        "2 - Minimal Progress: Final state shows a small but insufficient change toward the goal.\n"
        "3 - Partial Completion: The final state shows good progress toward the goal but violates more than "
        "one requirement or a major requirement.\n"
        "4 - Near Completion: Final state is correct in region and intent but misses a single minor "
        "requirement.\n"
        "5 - Perfect Completion: Final state satisfies all requirements.\n"
        f"\nTask: {task}"
    )
    # The time of a slice is the mean of its two frames' times.
    video = [part for number in range(slices) for part in (_text(f"<{2 * number + 0.5:.1f} seconds>"), IMAGE)]
    return [{"role": "user", "content": [*video, _text(request)]}]


def _judged(number: int, count: int) -> list[dict]:
    """Images with the numbers that Qwen's template gives them (`add_vision_id`) and a token behind each."""
    parts = []
    for picture in range(number, number + count):
        parts += [_text(f"Picture {picture}: "), IMAGE, {"type": "token", "token": "<|prog_token|>"}]
    return parts
