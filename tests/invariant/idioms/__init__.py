"""Ways in which others write models, with what `batch_invariant` makes of each."""

from tests.invariant.idioms import arrays as arrays
from tests.invariant.idioms import images as images
from tests.invariant.idioms import layers as layers
from tests.invariant.idioms import programs as programs
