"""Equal bits of plain and of speculative decoding: `models` and `requests`, then `study`."""
