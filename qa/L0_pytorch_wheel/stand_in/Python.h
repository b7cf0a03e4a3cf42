// Copyright (c) 2026, transformer-engine-ext authors.
// SPDX-License-Identifier: Apache-2.0
//
// Stands for Python's headers; nothing includes it.
