"""Images and videos: files, frames, patches, and a prompt with its images.

Read `images` and `videos` for the patches of the towers, then `prompt_images` for how they meet a prompt.
"""
