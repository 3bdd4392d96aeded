"""A tiny real checkpoint of the hybrid architecture, its tokenizer, and the long documents it reads."""
