"""The forms of a prompt."""

from quire.engine.front.prompts import Prompt, PromptDict, TextPrompt, TokensPrompt

PromptType = Prompt
SingletonPrompt = Prompt

__all__ = ["Prompt", "PromptDict", "PromptType", "SingletonPrompt", "TextPrompt", "TokensPrompt"]
