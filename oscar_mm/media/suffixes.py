"""What a file holds by its name, under the names of the arguments that take it."""

SUFFIXES = {
    "images": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tiff"),
    "videos": (".mp4", ".m4v", ".webm", ".mkv", ".mov", ".avi"),
    "audio": (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a", ".aac"),
}
KIND = {suffix: kind for kind, suffixes in SUFFIXES.items() for suffix in suffixes}
