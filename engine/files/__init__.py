"""Files and folders: where things are kept, room on the disk, locks, and two formats that are read strictly."""
