"""All models of the sweep by name; no framework is imported before a model is built."""

from diffusers_models import DIFFUSERS
from timm_models import TIMM
from transformers_models import TRANSFORMERS

MODELS = {model.name: model for model in (*TRANSFORMERS, *TIMM, *DIFFUSERS)}
