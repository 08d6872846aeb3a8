"""Models as data: families, tokenizer, chat template, sampling."""
