"""Control of a server by trainers: pauses, sleep, aborts and new weights, at paths with a key of their own.

Read `gate` first, which every request for an answer passes, then `control`, which opens and closes it, and `routes`.
"""
