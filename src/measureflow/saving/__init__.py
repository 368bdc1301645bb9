"""Things in files: safetensors for arrays, one JSON document for the rest, and no code.

`registry` is where classes say that they can be saved, `container` is the file, `encoding` and `decoding`
turn values into JSON and arrays and back, and `documents` has `save` and `load`. Checkpoints are such files.
"""
