"""Audits of rows, answers, runs and logprobs.

`certification` checks whether rows depend on their batch, and `verification` whether answers come from a given model.
`bisection` finds the equation at which two runs diverge, and `comparison` measures differences between logprobs.
"""

from detjax.audit.bisection.bisect import Bisection as Bisection
from detjax.audit.bisection.bisect import Difference as Difference
from detjax.audit.bisection.bisect import Drift as Drift
from detjax.audit.bisection.bisect import bisect as bisect
from detjax.audit.bisection.isolation import IsolatedLayer as IsolatedLayer
from detjax.audit.bisection.traces import Trace as Trace
from detjax.audit.bisection.traces import trace_digests as trace_digests
from detjax.audit.certification.certify import Certificate as Certificate
from detjax.audit.certification.certify import Outcome as Outcome
from detjax.audit.certification.certify import certify as certify
from detjax.audit.certification.certify import risks as risks
from detjax.audit.certification.engine_programs import engine_risks as engine_risks
from detjax.audit.certification.roles import Risk as Risk
from detjax.audit.certification.roles import Role as Role
from detjax.audit.certification.trials import Counterexample as Counterexample
from detjax.audit.comparison.compare import Comparison as Comparison
from detjax.audit.comparison.compare import compare as compare
from detjax.audit.comparison.divergence import Divergence as Divergence
from detjax.audit.comparison.divergence import divergence as divergence
from detjax.audit.comparison.logprob_files import ScoredTokens as ScoredTokens
from detjax.audit.comparison.logprob_files import read_logprobs as read_logprobs
from detjax.audit.verification.receipts import read_transcripts as read_transcripts
from detjax.audit.verification.receipts import transcripts_in as transcripts_in
from detjax.audit.verification.transcripts import Origin as Origin
from detjax.audit.verification.transcripts import Transcript as Transcript
from detjax.audit.verification.transcripts import transcripts_of as transcripts_of
from detjax.audit.verification.verify import Verdict as Verdict
from detjax.audit.verification.verify import Verifier as Verifier
from detjax.audit.verification.verify import verify as verify
