// SPDX-License-Identifier: Apache-2.0
// Types of the functions of the driver.
#pragma once

#include "cuda.h"
