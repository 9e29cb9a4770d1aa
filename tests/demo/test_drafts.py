"""The drafts that ship for the demo's checkpoint."""

import jax.numpy as jnp
import numpy as np

from detjax import demo
from detjax.models import load, load_draft

VERSE = "JULIET:\nO Romeo, Romeo! wherefore art thou Romeo?\nDeny thy father"


def test_they_are_small() -> None:
    files = [file for folder in (demo.EAGLE3, demo.DRAFT_MODEL) for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < 1_000_000


def test_the_head_guesses_the_checkpoint_s_likeliest_token_on_a_verse() -> None:
    model, tokenizer = load(demo.CHECKPOINT, progress=False)
    assert tokenizer is not None
    ids = jnp.array([tokenizer.encode(VERSE)], jnp.int32)
    likeliest = np.asarray(model(ids))[0, 1:].argmax(-1)
    draft = load_draft(demo.EAGLE3, model)
    assert draft.target_ids is not None
    guesses = draft.target_ids[np.asarray(draft.logits(ids))[0].argmax(-1)]
    assert np.mean(guesses == likeliest) > 0.4
