"""Speculative decoding: tokens are guessed, and a step of the model verifies several of them at once.

A token is a function of the tokens before it, the request and the weights. So a guess is right exactly if it equals the
token that the model itself chooses there, at any temperature, and drafts are a schedule: no bit depends on them.

Read `speculative_config`, `drafter` (the interface of everything that guesses), `prompt_lookup` and `draft_model`, then
`draft_lengths`, `look_ahead` and `drafting`, which the step loop calls.
"""
