"""Models in files: safetensors for arrays, one JSON document for the rest, and no code.

`container` is the file, `encoding` and `decoding` turn values into JSON and arrays and back, `documents` has
`save` and `load`, and `kinds` is the table of what can be saved. Classes that have a method `save` import
`documents`; `kinds` imports the classes.
"""
