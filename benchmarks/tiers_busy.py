def busy(options, folder):
    return []
