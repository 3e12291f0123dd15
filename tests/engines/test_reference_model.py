"""The policy itself: its gradient, its distribution, its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.engines.reference import checkpoint, model
from stitch.engines.reference.model import BOS, EOS, ModelConfig
from stitch.engines.reference.sequence import Sampling, Sequence
from tests.support.engines import digest_of_files

pytestmark = pytest.mark.unit

SMALL = ModelConfig(embedding=3, context=2, hidden=4)
EPISODES = [([104, 105], [33, EOS]), ([], [65, 66, 67]), ([1], [])]
ADVANTAGES = [0.7, -1.3, 5.0]


def objective(params: dict[str, model.Array]) -> float:
    pairs = zip(EPISODES, ADVANTAGES, strict=True)
    return float(sum(scale * model.log_probabilities(params, episode).sum() for episode, scale in pairs))


def test_the_gradient_is_that_of_the_objective() -> None:
    """Against central differences, in f64, on every parameter that takes part and some that do not."""
    params = {name: array.astype(np.float64) for name, array in model.init(SMALL, 3).items()}
    grads = model.policy_gradient(params, EPISODES, ADVANTAGES)
    rng = np.random.default_rng(0)
    step = 1e-6
    for name, array in params.items():
        grad = grads[name]
        touched = np.argwhere(grad != 0)
        places = [*rng.permutation(touched)[:25], *np.argwhere(grad == 0)[:5]]
        assert len(touched) > 0
        for place in map(tuple, places):
            value = array[place]
            array[place] = value + step
            above = objective(params)
            array[place] = value - step
            below = objective(params)
            array[place] = value
            assert grad[place] == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-7), (name, place)


def test_a_step_along_the_gradient_raises_the_objective() -> None:
    params = model.init(ModelConfig(), 3)
    grads = model.policy_gradient(params, EPISODES, ADVANTAGES)
    assert {name: (grad.shape, grad.dtype) for name, grad in grads.items()} == {
        name: (array.shape, array.dtype) for name, array in params.items()
    }
    moved = {name: array + np.float32(0.01) * grads[name] for name, array in params.items()}
    assert objective(moved) > objective(params)


def test_nothing_written_has_no_gradient_and_lengths_must_agree() -> None:
    params = model.init(SMALL, 0)
    assert not any(grad.any() for grad in model.policy_gradient(params, [([1, 2], [])], [1.0]).values())
    with pytest.raises(ValueError, match="advantages"):
        model.policy_gradient(params, EPISODES, [1.0])


def test_a_row_is_computed_alike_alone_and_among_others() -> None:
    params = model.to_f32(model.to_bf16(model.init(ModelConfig(), 1)))
    contexts = np.random.default_rng(5).integers(0, 256, size=(37, 8))
    together = model.logits(params, contexts)
    for row, context in zip(together, contexts, strict=True):
        assert np.array_equal(model.logits(params, context[None])[0], row)


def test_a_fresh_policy_writes_mostly_printable_text_and_never_bos() -> None:
    params = model.init(ModelConfig(), 2)
    probabilities = np.exp(model.log_softmax(model.logits(params, np.asarray([[BOS] * 8, list(b"abcdefgh")]))))
    assert probabilities.sum(axis=1) == pytest.approx([1, 1], abs=1e-5)
    assert (probabilities[:, 32:127].sum(axis=1) > 0.6).all()
    assert (probabilities[:, BOS] == 0).all()
    assert (probabilities[:, EOS] < 0.2).all()


def draws(sampling: Sampling, scores: model.Array, count: int) -> list[int]:
    sequence = Sequence(rid="r", prompt=[], sampling=sampling)
    return [sequence.choose(scores)[0] for _ in range(count)]


def test_sampling_follows_temperature_top_k_and_top_p() -> None:
    scores = np.full(model.VOCABULARY, model.NEVER, dtype=np.float32)
    scores[:4] = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(draws(Sampling(temperature=0), scores, 5)) == {0}
    assert set(draws(Sampling(top_k=2, seed=1), scores, 300)) == {0, 1}
    assert set(draws(Sampling(top_p=0.6, seed=1), scores, 300)) == {0, 1}
    free = draws(Sampling(seed=1), scores, 4000)
    shares = [free.count(token) / len(free) for token in range(4)]
    assert shares == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.04)
    assert draws(Sampling(seed=1), scores, 50) == free[:50]
    hot = draws(Sampling(temperature=5, seed=1), scores, 4000)
    assert hot.count(3) > 2 * free.count(3)


def test_the_log_probability_is_that_of_the_policy() -> None:
    params = model.init(ModelConfig(), 2)
    prompt, output = model.encode("once "), model.encode("upon")
    expected = model.log_probabilities(params, (prompt, output))
    for position, token in enumerate(output):
        context = np.asarray([model.last_context([*prompt, *output[:position]], 8)])
        row = model.log_softmax(model.logits(params, context))[0]
        assert row[token] == pytest.approx(float(expected[position]), abs=1e-6)


def test_a_sequence_ends_at_eos_at_a_stop_text_and_at_its_length() -> None:
    def written(sampling: Sampling, tokens: list[int]) -> Sequence:
        sequence = Sequence(rid="r", prompt=[1], sampling=sampling)
        for token in tokens:
            if sequence.finish is None:
                sequence.append(token, -1.0, label="0", digest="d")
        return sequence

    ended = written(Sampling(), [65, EOS, 66])
    assert (ended.finish, ended.text, ended.output) == ({"type": "stop", "matched": EOS}, "A", [65, EOS])
    stopped = written(Sampling(stop=("lo",)), model.encode("hello"))
    assert (stopped.finish, stopped.text) == ({"type": "stop", "matched": "lo"}, "hel")
    full = written(Sampling(max_new_tokens=3, ignore_eos=True), [65, EOS, 66, 67])
    assert (full.finish, full.text, full.output) == ({"type": "length", "length": 3}, "AB", [65, EOS, 66])


def test_text_is_cut_between_characters_only() -> None:
    sequence = Sequence(rid="r", prompt=[], sampling=Sampling(max_new_tokens=4))
    texts = []
    for token in [*"é".encode(), *"é".encode()[:1], 65]:
        sequence.append(token, -1.0, label="0", digest="d")
        texts.append(sequence.text)
    assert texts == ["", "é", "é", "é\N{REPLACEMENT CHARACTER}A"]


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    params = model.to_bf16(model.init(ModelConfig(), 4))
    assert {str(array.dtype) for array in params.values()} == {"bfloat16", "float32"}
    checkpoint.save(tmp_path / "v", params)
    loaded = checkpoint.load(tmp_path / "v")
    assert {name: (str(a.dtype), a.tobytes()) for name, a in loaded.items()} == {
        name: (str(a.dtype), a.tobytes()) for name, a in params.items()
    }
    assert checkpoint.digest(loaded) == digest_of_files(tmp_path / "v")
    assert checkpoint.load_config(tmp_path / "v") == ModelConfig()


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 6), ("b", 6), ("c", 7)):
        checkpoint.save(tmp_path / name, model.to_bf16(model.init(ModelConfig(), seed)))
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    good = model.to_bf16(model.init(ModelConfig(), 4))

    def saved(name: str, params: dict[str, model.Array]) -> Path:
        checkpoint.save(tmp_path / name, params)
        return tmp_path / name

    cut = saved("cut", good) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-7])
    lacking = {name: array for name, array in good.items() if name != "hidden.bias"}
    extra = {**good, "extra.weight": good["hidden.bias"]}
    misshapen = {**good, "output.bias": good["output.bias"][:-1].copy()}
    for directory in (cut.parent, saved("lacking", lacking), saved("extra", extra), saved("misshapen", misshapen)):
        with pytest.raises(CorruptObject):
            checkpoint.load(directory)
    (tmp_path / "none").mkdir()
    with pytest.raises(InvalidRequest):
        checkpoint.load(tmp_path / "none")
    wider = saved("wider", {**good, "hidden.bias": good["hidden.bias"].astype(np.float64)})
    assert checkpoint.load(wider)["hidden.bias"].dtype == np.float64
    with pytest.raises(CorruptObject, match="float64"):
        checkpoint.load_matching(wider, good)
