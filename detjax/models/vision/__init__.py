"""Images and videos: files, frames, patches, and prompts with images.

Read `images` and `videos` for the patches of the towers, then `prompt_images` for their place in a prompt.
"""
