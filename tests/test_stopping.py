"""Where answers end, by hand; drafted tokens or not must make no difference."""

import pytest

from tests.fakes import FakeTarget, make_engine, run_script, scripted, scripted_logits
from workers.config import SamplingParams
from workers.request import Completion, Request

EOS = 256
DRAFTED = pytest.mark.parametrize("num_spec_tokens", [0, 1, 4, 9])


def text_ids(text: str) -> list[int]:
    return list(text.encode())


def spell(text: str, num_spec_tokens: int, **params: object) -> Completion:
    """The completion of a target that would go on to spell all of `text`."""
    params = {"max_tokens": 40, **params}
    return run_script(text_ids(text), SamplingParams.model_validate(params), num_spec_tokens)


def check_stop(completion: Completion, stop_reason: object, text: str, num_tokens: int) -> None:
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == stop_reason
    assert completion.text == text
    assert len(completion.token_ids) == num_tokens


@DRAFTED
@pytest.mark.parametrize("eos", [256, 257, 258])
def test_any_of_several_eos_ids(eos: int, num_spec_tokens: int) -> None:
    answer = [97, 98, eos, 99, 100, 101]
    params = SamplingParams(max_tokens=6)
    completion = run_script(answer, params, num_spec_tokens, eos_token_ids=(256, 257, 258))
    assert completion.token_ids == (97, 98, eos)
    check_stop(completion, None, "ab", 3)


@DRAFTED
def test_stop_token_id_is_the_stop_reason(num_spec_tokens: int) -> None:
    completion = spell("abcdef", num_spec_tokens, stop_token_ids=[ord("x"), ord("c")])
    assert completion.token_ids == tuple(text_ids("abc"))
    check_stop(completion, ord("c"), "abc", 3)


@DRAFTED
def test_ignore_eos(num_spec_tokens: int) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    completion = run_script([97, EOS, 98, EOS, 99, 100], params, num_spec_tokens)
    assert completion.token_ids == (97, EOS, 98, EOS, 99)
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert completion.text == "abc"


@DRAFTED
def test_ignore_eos_still_obeys_stop_token_ids(num_spec_tokens: int) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(98,))
    completion = run_script([97, EOS, 98, 99], params, num_spec_tokens)
    check_stop(completion, 98, "ab", 3)


@DRAFTED
@pytest.mark.parametrize(
    ("text", "stop", "kept", "stop_reason", "num_tokens"),
    [
        ("one STOP two", ["STOP"], "one ", "STOP", 8),  # Spans four tokens.
        ("STOP", ["STOP"], "", "STOP", 4),
        ("aaab!", ["aab"], "a", "aab", 4),  # A false start overlaps the match.
        ("ababac!", ["abac"], "ab", "abac", 6),
        ("xyzzy..", ["zzy", "yz"], "x", "yz", 3),  # The one that is completed first.
        (
            "abcd....",
            ["bcd", "abcd"],
            "",
            "abcd",
            4,
        ),  # Completed together: the one that begins first.
        ("abcd....", ["cd", "bcd"], "a", "bcd", 4),
        ("ab", "b", "a", "b", 2),  # One string stands for a list of one.
        ("a\n\nb", ["\n\n"], "a", "\n\n", 3),
        ("aXbX", ["X"], "a", "X", 2),  # The first of two.
        ("näh", ["äh"], "n", "äh", 4),  # ä is two tokens.
        ("a€b", ["€"], "a", "€", 4),  # € is three tokens: ends with the last of them.
        ("日本語。終", ["本語"], "日", "本語", 9),
    ],
)
def test_stop_string(
    text: str, stop: object, kept: str, stop_reason: str, num_tokens: int, num_spec_tokens: int
) -> None:
    completion = spell(text, num_spec_tokens, stop=stop)
    assert completion.token_ids == tuple(text_ids(text)[:num_tokens])
    check_stop(completion, stop_reason, kept, num_tokens)


@DRAFTED
def test_text_that_only_looks_like_a_stop_string(num_spec_tokens: int) -> None:
    completion = spell("STO STAP ST", num_spec_tokens, stop=["STOP"], max_tokens=11)
    assert completion.finish_reason == "length"
    assert completion.text == "STO STAP ST"


@DRAFTED
def test_a_special_token_is_no_part_of_the_text(num_spec_tokens: int) -> None:
    params = SamplingParams(max_tokens=9, stop=("ab",))
    completion = run_script([120, 97, 258, 98, 121], params, num_spec_tokens)
    check_stop(completion, "ab", "x", 4)


@DRAFTED
def test_a_character_left_unfinished_by_the_length(num_spec_tokens: int) -> None:
    completion = spell("ab€", num_spec_tokens, max_tokens=4, stop=["zz"])
    assert completion.finish_reason == "length"
    assert completion.text == "ab\N{REPLACEMENT CHARACTER}"


@DRAFTED
def test_min_tokens_holds_stop_strings_back(num_spec_tokens: int) -> None:
    check_stop(spell("a.b.c.d", num_spec_tokens, stop=["."]), ".", "a", 2)
    # The first stop is completed by token 2, the second by token 4.
    for min_tokens, kept, num_tokens in [
        (1, "a", 2),
        (2, "a.b", 4),
        (3, "a.b", 4),
        (4, "a.b.c", 6),
    ]:
        completion = spell("a.b.c.d", num_spec_tokens, stop=["."], min_tokens=min_tokens)
        check_stop(completion, ".", kept, num_tokens)


@DRAFTED
def test_a_stop_string_within_min_tokens_stays_dead_beside_a_longer_one(
    num_spec_tokens: int,
) -> None:
    completion = spell("a.bcdef.g", num_spec_tokens, stop=[".", "0123456789"], min_tokens=3)
    check_stop(completion, ".", "a.bcdef", 8)


@DRAFTED
def test_a_stop_string_that_straddles_min_tokens(num_spec_tokens: int) -> None:
    check_stop(spell("abcdef", num_spec_tokens, stop=["bcd"], min_tokens=3), "bcd", "a", 4)


@DRAFTED
def test_stop_token_ids_within_min_tokens_are_never_drawn(num_spec_tokens: int) -> None:
    """The logits prefer the stop token always and "z" next: z for exactly min_tokens, then the stop."""

    def logits(_history: tuple[int, ...]) -> list[float]:
        return [{ord("s"): 2.0, ord("z"): 1.0}.get(i, 0.0) for i in range(260)]

    target = FakeTarget(logits, 260, (EOS,))
    proposers = scripted({"r": text_ids("zzzsss")}, (99,), 260)
    engine = make_engine(target, proposers, num_spec_tokens=num_spec_tokens)
    params = SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=(ord("s"),))
    (completion,) = engine.generate([Request("r", (1,), params, seed=0)])
    check_stop(completion, ord("s"), "zzzs", 4)


@DRAFTED
def test_length_by_max_tokens(num_spec_tokens: int) -> None:
    for max_tokens in (1, 2, 6):
        completion = spell("abcdefgh", num_spec_tokens, max_tokens=max_tokens)
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
        assert completion.text == "abcdefgh"[:max_tokens]


@DRAFTED
@pytest.mark.parametrize("max_model_len", [4, 5, 9])
def test_length_by_max_model_len(max_model_len: int, num_spec_tokens: int) -> None:
    """The prompt has 3 tokens."""
    params = SamplingParams(max_tokens=40)
    answer = text_ids("abcdefghij")
    completion = run_script(answer, params, num_spec_tokens, max_model_len=max_model_len)
    assert completion.finish_reason == "length"
    assert completion.text == "abcdefghij"[: max_model_len - 3]


@DRAFTED
def test_a_stop_at_the_very_end_of_the_row_is_a_stop(num_spec_tokens: int) -> None:
    params = SamplingParams(max_tokens=40)
    completion = run_script([97, 98, EOS, 99], params, num_spec_tokens, max_model_len=6)
    check_stop(completion, None, "ab", 3)


def test_requests_that_cannot_run_are_refused_and_the_rest_run() -> None:
    target = FakeTarget(scripted_logits({(5, 6): [10, 11]}, 30), 30)
    params = SamplingParams(max_tokens=2)
    bad_stop = SamplingParams(max_tokens=2, stop_token_ids=(30,))
    requests = [
        Request("empty", (), params, seed=0),
        Request("good-1", (5, 6), params, seed=0),
        Request("no room", (1,) * 8, params, seed=0),
        Request("longer still", (1,) * 50, params, seed=0),
        Request("id 30", (5, 30), params, seed=0),
        Request("id -1", (-1, 5), params, seed=0),
        Request("stop id", (5, 6), bad_stop, seed=0),
        Request("good-2", (5, 6), params, seed=0),
    ]
    engine = make_engine(target, max_num_seqs=2, max_model_len=8)
    completions = {c.request.id: c for c in engine.generate(requests)}
    assert set(completions) == {request.id for request in requests}
    for name, completion in completions.items():
        if name.startswith("good"):
            assert (completion.token_ids, completion.finish_reason) == ((10, 11), "length")
            assert completion.error is None
            assert completion.error_type is None
        else:
            assert (completion.token_ids, completion.finish_reason) == ((), "error")
            assert completion.error_type == "InvalidPrompt"
    reasons = {name: completions[name].error or "" for name in completions}
    assert "no tokens" in reasons["empty"]
    assert "8" in reasons["no room"]
    assert "50" in reasons["longer still"]
    assert "30" in reasons["id 30"]
    assert "-1" in reasons["id -1"]
    assert "30" in reasons["stop id"]


def test_a_prompt_that_leaves_room_for_one_token() -> None:
    target = FakeTarget(scripted_logits({(5,) * 7: [10, 11]}, 30), 30)
    engine = make_engine(target, max_model_len=8)
    (completion,) = engine.generate([Request("r", (5,) * 7, SamplingParams(max_tokens=9), seed=0)])
    assert (completion.token_ids, completion.finish_reason) == ((10,), "length")
