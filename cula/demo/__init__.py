"""The demo: a byte-level language model of KDA layers, trained on real text in minutes, then used to write text."""
