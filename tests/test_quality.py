"""Scores of formats as a constraint: what scores too little, or has no score, is not in the space."""

import pytest

from breakeven.models.inputs import InputError

SCORES = "weights,kv,score\nbf16,bf16,0.86\nfp8,bf16,0.855\nfp8,fp8,0.84\n"


def limited(make_study, tmp_path, text, least):
    (tmp_path / "scores.csv").write_text(text)
    return make_study(f"limits.quality={{table: {tmp_path / 'scores.csv'}, at_least: {least}}}")


def test_only_formats_that_score_enough_are_left(make_study, tmp_path):
    whole, some = make_study(), limited(make_study, tmp_path, SCORES, 0.85)
    frame = some.space.frame(range(some.space.size))
    pairs = set(zip(frame["decode_weights"], frame["kv"], strict=True))
    assert pairs == {("bf16", "bf16"), ("fp8", "bf16")}  # 8-bit KV beside 16-bit weights has no score
    assert set(frame["prefill_weights"]) == {"bf16", "fp8"} and some.space.size == whole.space.size // 2
    stricter = limited(make_study, tmp_path, SCORES, 0.86)
    left = stricter.space.frame(range(stricter.space.size))
    assert set(left["prefill_weights"]) | set(left["decode_weights"]) == {"bf16"}


def test_a_pool_with_worse_weights_is_out_whatever_the_other_has(make_study, tmp_path):
    study = limited(make_study, tmp_path, SCORES.replace("fp8,bf16,0.855\n", ""), 0.84)
    frame = study.space.frame(range(study.space.size))
    assert (frame["prefill_weights"].astype(str) == frame["kv"].astype(str)).all()
    assert (frame["decode_weights"].astype(str) == frame["kv"].astype(str)).all()


@pytest.mark.parametrize(
    ("text", "least", "says"),
    [
        (SCORES, 0.9, r"limits\.quality\.at_least = 0\.9: no formats of this space score as much; the best have 0\.86"),
        ("weights,kv\nbf16,bf16\n", 0.5, "score = None: a column of the table of scores"),
        ("weights,kv,score\nbf16,bf16,good\n", 0.5, "score, row 1 = 'good': a number"),
        (
            "weights,kv,score\nfp8,fp8,1\nfp8,fp8,1\n",
            0.5,
            "weights, kv, row 2 = 'fp8, fp8': each combination once",
        ),
        ("weights,kv,score,llm\nbf16,bf16,1,other\n", 0.5, "llm = 'llama-3.1-70b': a model that the table"),
        ("", 0.5, r"limits\.quality\.table = .*: a CSV file that can be read"),
    ],
)
def test_faults_say_what_is_allowed(make_study, tmp_path, text, least, says):
    with pytest.raises(InputError, match=says):
        limited(make_study, tmp_path, text, least)
