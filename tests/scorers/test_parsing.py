"""Answers of models: understood whole or not at all, and never a crash."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxreward.scorers.parsing import parse_percentages, parse_ranks, parse_score

LONG = """I will compare the 3 frames with the first one.

Frame 1:
Frame Description: the cat stands at column 7, after 12 moves. Rank: high
Rank: 3
Frame 2:
Frame Description: 2 monsters are left.
They are to the right of Frame 3.
Rank: 1
Frame 3:
Frame Description: one ladder was climbed
Rank: 2

So the order is 2, 3, 1 (100 %).
"""

prose = st.text(max_size=60).filter(
    lambda text: (
        not any(line.lstrip().startswith(("Frame", "Rank", "Task", "ANSWER")) for line in text.splitlines())
    )
)


def written(values, order, long, words, label="Rank", unit=""):
    """An answer, with prose before, between and after its blocks."""
    lines = [words[0]]
    for place, frame in enumerate(order):
        value = f"{label}: {values[frame]}{unit}"
        if long:
            lines += [f"Frame {frame + 1}:", f"Frame Description: x{' '.join(words[1].split())}", value]
        else:
            lines.append(f"Frame {frame + 1}: {value}")
        lines.append(words[2 + place % 2])
    return "\n".join(lines)


answers = st.integers(1, 15).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(1, count), min_size=count, max_size=count),
        st.permutations(range(count)),
        st.booleans(),
        st.tuples(prose, prose, prose, prose),
    )
)


def test_the_paper_s_format_with_numbers_in_its_prose():
    parsed = parse_ranks(LONG, 3)
    assert parsed.ok, parsed.reason
    assert parsed.values.tolist() == [3, 1, 2]
    assert parsed.values.dtype == np.float32


def test_the_short_format():
    assert parse_ranks("Frame 2: Rank: 1\nFrame 1: Rank: 2", 2).values.tolist() == [2, 1]
    assert parse_ranks(" Frame 1 : 2 \r\nFrame 2:1", 2).values.tolist() == [2, 1]


@given(answers)
def test_what_was_written_is_read(answer):
    values, order, long, words = answer
    parsed = parse_ranks(written(values, order, long, words), len(values))
    assert parsed.ok, parsed.reason
    assert parsed.values.tolist() == values


@given(answers, st.data())
def test_a_frame_left_out_or_given_twice_is_refused(answer, data):
    values, order, long, words = answer
    order = list(order)
    chosen = data.draw(st.sampled_from(order))
    fewer = [frame for frame in order if frame != chosen]
    parsed = parse_ranks(written(values, fewer, long, words), len(values))
    assert not parsed.ok
    assert parsed.values.shape == (len(values),)
    twice = parse_ranks(written(values, [*order, chosen], long, words), len(values))
    assert not twice.ok
    assert "twice" in twice.reason
    one_more = parse_ranks(written([*values, 1], [*order, len(values)], long, words), len(values))
    assert not one_more.ok


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "0 of 2 frames"),
        ("3, 1, 2", "0 of 2 frames"),
        ("Frame 1: Rank: 1", "frame 2 is missing"),
        ("Frame 1: Rank: 5 + 1\nFrame 2: Rank: 1", "'Rank: 5 + 1' found"),
        ("Frame 1: Rank: two\nFrame 2: Rank: 1", "'Rank: two' found"),
        ("Frame 1: Rank: 1.5\nFrame 2: Rank: 1", "1.5"),
        ("Frame 1: Rank: -1\nFrame 2: Rank: 1", "-1"),
        ("Frame 1: Rank: 0\nFrame 2: Rank: 1", "1 .. 2 expected"),
        ("Frame 1: Rank: 3\nFrame 2: Rank: 1", "1 .. 2 expected"),
        ("Frame 1: Rank:\nFrame 2: Rank: 1", "'Rank:' found"),
        ("Frame 0: Rank: 1\nFrame 1: Rank: 2", "frames 1 to 2 were shown"),
        ("Frame 1:\nFrame Description: a\nFrame 2:\nRank: 1", "frame 1 has no value"),
        ("Frame 1:\nRank: 1\nRank: 2\nFrame 2:\nRank: 2", "without its frame"),
        ("Frame 1: Rank: 1\nFrame 2:\nFrame Description: the end", "frame 2 has no value"),
        ("Frame 1: Rank: 1 or 2\nFrame 2: Rank: 1", "1 or 2"),
        ("Frame 1: Rank: \u0661\nFrame 2: Rank: 1", "found"),  # an Arabic digit
        ("Frame 1: Rank: " + "9" * 1_000_000 + "\nFrame 2: Rank: 1", "found"),
    ],
)
def test_malformed_answers_say_why(answer, reason):
    parsed = parse_ranks(answer, 2)
    assert not parsed.ok
    assert reason in parsed.reason
    assert len(parsed.reason) < 200
    assert parsed.values.tolist() == [0, 0]


@pytest.mark.parametrize(
    "piece", ["Frame 1: ", "Rank: ", " ", "\n", "9", "Frame Description: x\n", "Frame 1:\n"]
)
def test_a_million_characters(piece):
    assert not parse_ranks(piece * (1_000_000 // len(piece)), 14).ok
    assert not parse_percentages(piece * (1_000_000 // len(piece)), 14).ok


@given(
    st.text(alphabet=st.sampled_from("Frame Rank:Dscipto0123456789%\n\r\t +-"), max_size=300),
    st.integers(0, 9),
)
def test_any_text_gives_a_value_for_every_frame_or_a_reason(text, count):
    for parse in (parse_ranks, parse_percentages):
        parsed = parse(text, count)
        assert parsed.values.shape == (count,)
        assert parsed.ok == (parsed.reason == "")
        assert np.isfinite(parsed.values).all()


@given(answers)
def test_percentages_are_taken_as_given(answer):
    values, order, long, words = answer
    text = written(values, order, long, words, "Task Completion Percentages", "%")
    parsed = parse_percentages(text, len(values))
    assert parsed.ok, parsed.reason
    assert parsed.values.tolist() == values


def test_percentages_with_fractions_and_their_limits():
    text = "Frame 1: Task Completion Percentages: 12.5%\nFrame 2: Task Completion Percentage: 100 %"
    assert parse_percentages(text, 2).values.tolist() == [12.5, 100]
    assert not parse_percentages(text.replace("100", "101"), 2).ok
    assert not parse_percentages(text.replace("12.5%", "0.125"), 2).ok
    assert not parse_percentages(text.replace("12.5%", "-12.5%"), 2).ok


@given(prose, st.integers(1, 5), prose)
def test_a_score_among_prose(before, score, after):
    parsed = parse_score(f"{before}\nANSWER: {score}\n{after}")
    assert parsed.ok, parsed.reason
    assert parsed.values.tolist() == [score]
    assert parsed.values.dtype == np.float32
    assert not parse_score(f"ANSWER: {score}\n{before}\nANSWER: {score}").ok


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "0 lines"),
        ("4", "0 lines"),
        ("The final state is correct: ANSWER: 4", "0 lines"),
        ("answer: 4", "0 lines"),
        ("ANSWER: 4\nANSWER: 4", "2 lines"),
        ("ANSWER: <4>", "'ANSWER: <4>' found"),
        ("ANSWER: 0", "1 .. 5 expected"),
        ("ANSWER: 6", "1 .. 5 expected"),
        ("ANSWER: 44", "1 .. 5 expected"),
        ("ANSWER: -1", "1 .. 5 expected"),
        ("ANSWER: 4.5", "'ANSWER: 4.5' found"),
        ("ANSWER: 4 or 5", "'ANSWER: 4 or 5' found"),
        ("ANSWER:", "'ANSWER:' found"),
        ("ANSWER: \u0664", "found"),  # an Arabic digit
        ("ANSWER: " + "9" * 1_000_000, "found"),
    ],
)
def test_scores_that_cannot_be_read(answer, reason):
    parsed = parse_score(answer)
    assert not parsed.ok
    assert reason in parsed.reason
    assert len(parsed.reason) < 200
    assert parsed.values.tolist() == [0]


@pytest.mark.parametrize("piece", ["ANSWER: ", "ANSWER", "ANSWER: 4\n", " ", "\n", "9", "ANSWER: 4 "])
def test_a_million_characters_hold_no_score(piece):
    assert not parse_score(piece * (1_000_000 // len(piece))).ok


@given(st.text(alphabet=st.sampled_from("ANSWER: 0123456789\n\r\t<>-."), max_size=200))
def test_any_text_gives_a_score_or_a_reason(text):
    parsed = parse_score(text)
    assert parsed.values.shape == (1,)
    assert parsed.ok == (parsed.reason == "")
    assert parsed.values[0] in ([1, 2, 3, 4, 5] if parsed.ok else [0])


def test_spaces_around_a_score():
    assert parse_score(" ANSWER : 5 \r\n").values.tolist() == [5]
