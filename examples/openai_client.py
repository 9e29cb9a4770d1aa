"""OpenAI's client with `detjax serve`: streams an answer, and requests it again.

detjax serve detjax/demo/checkpoint --port 8000
python examples/openai_client.py http://localhost:8000/v1
"""

import sys

import openai

PROMPT = "KING RICHARD III:\n"


def main() -> None:
    """Prints a streamed answer, and whether a second one is equal in every logprob."""
    client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
    model = client.models.list().data[0].id
    stream = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=16, temperature=0.8, seed=7, logprobs=0, stream=True
    )
    logprobs = []
    for chunk in stream:
        print(chunk.choices[0].text, end="", flush=True)
        if (reported := chunk.choices[0].logprobs) is not None:
            logprobs += reported.token_logprobs or []
    again = client.completions.create(model=model, prompt=PROMPT, max_tokens=16, temperature=0.8, seed=7, logprobs=0)
    reported = again.choices[0].logprobs
    print("\nthe second answer has the same bits:", reported is not None and reported.token_logprobs == logprobs)
    print("fingerprint:", again.system_fingerprint)


if __name__ == "__main__":
    main()
