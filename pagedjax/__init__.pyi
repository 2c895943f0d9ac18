from pagedjax.config import EngineConfig as EngineConfig
from pagedjax.errors import UserError as UserError
from pagedjax.host.request import SamplingParams as SamplingParams
from pagedjax.llm import LLM as LLM
from pagedjax.llm import RequestOutput as RequestOutput
from pagedjax.llm import Score as Score
