"""Text in, tokens through, text out: tokenizers, chat templates, incremental detokenization and
stop strings.

Owns everything that knows characters. Never imports torch or `transformers`, never downloads, and
never executes code of a model folder: a tokenizer is `tokenizer.json` read by the `tokenizers`
library, a chat template is a sandboxed Jinja source. Importing this package imports neither
library; they load with the first tokenizer or template.
"""
