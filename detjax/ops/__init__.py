"""The operations under contract. Each gives one set of bits, whatever schedule, batch or phase serves it."""

from detjax.ops.attention import attention as attention
from detjax.ops.attention import contiguous_page_table as contiguous_page_table
from detjax.ops.attention import dot_product_attention as dot_product_attention
from detjax.ops.attention import in_pages as in_pages
from detjax.ops.attention import ragged_attention as ragged_attention
from detjax.ops.collectives import psum as psum
from detjax.ops.collectives import psum_scatter as psum_scatter
from detjax.ops.embedding import embed as embed
from detjax.ops.matmul import matmul as matmul
from detjax.ops.norm import rms_norm as rms_norm
from detjax.ops.quantized_kv import QuantizedPages as QuantizedPages
from detjax.ops.quantized_kv import dequantize_kv as dequantize_kv
from detjax.ops.quantized_kv import quantize_kv as quantize_kv
from detjax.ops.rope import LinearScaling as LinearScaling
from detjax.ops.rope import Llama3Scaling as Llama3Scaling
from detjax.ops.rope import RotaryEmbedding as RotaryEmbedding
from detjax.ops.rope import YarnScaling as YarnScaling
from detjax.ops.rope import qk_rope as qk_rope
from detjax.ops.rope import rope as rope
from detjax.ops.rope_append import qk_rope_append_kv as qk_rope_append_kv
from detjax.ops.sampling import sample as sample
from detjax.ops.sampling import seed_words as seed_words
from detjax.ops.sampling import top_logprobs as top_logprobs
from detjax.ops.softmax import log_softmax as log_softmax
from detjax.ops.softmax import logsumexp as logsumexp
from detjax.ops.softmax import softmax as softmax
