"""The packed format: its parts, reading, writing, the folder of packed models, and quantising weights into it."""
