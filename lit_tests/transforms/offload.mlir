// RUN: stablehlo-tools opt %s -p 'offload{memory-limit=0.0093}' | filecheck %s

// Of three stacks as many go to the host's memory as it takes. A row is copied there in the next
// iteration, and back in the one before it is read; the last one is handed from loop to loop.
// Its place in the stack is that of the row after it, so that no index changes.
// CHECK-LABEL: func.func @loops
// CHECK:       %[[FORWARD:.+]]:8 = stablehlo.while
// CHECK:         %[[LATE:.+]] = stablehlo.custom_call @annotate_device_placement(%{{iterArg.+}}) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}}
// CHECK:         %[[TANH:.+]] = stablehlo.tanh
// CHECK:         %[[ROW:.+]] = stablehlo.reshape %[[TANH]]
// CHECK-NEXT:    %[[ROWS:.+]] = stablehlo.dynamic_update_slice %{{.+}}, %[[LATE]], %iterArg, %c, %c :
// CHECK:         stablehlo.return %[[NEXT:.+]], %{{.+}}, %[[TANH]], %{{.+}}, %[[ROWS]], %{{.+}}, %{{.+}}, %[[ROW]] :
// CHECK:       stablehlo.while({{.*}} = %[[FORWARD]]#6, %[[FIRST:.+]] = %[[FORWARD]]#7) :
// CHECK:         %[[INDEX:.+]] = stablehlo.subtract
// CHECK:         %[[THERE:.+]] = stablehlo.dynamic_slice %iterArg_9, %[[INDEX]], %c, %c,
// CHECK-NEXT:    %[[BACK:.+]] = stablehlo.custom_call @annotate_device_placement(%[[THERE]]) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "device"}}
// CHECK-NEXT:    stablehlo.reshape %[[FIRST]] :
// CHECK:         stablehlo.return {{.*}}, %[[BACK]] :
func.func @loops(%w: tensor<8x256x256xf32>, %x: tensor<256x256xf32>) -> (tensor<256x256xf32>, tensor<8x256x256xf32>) {
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %c7 = stablehlo.constant dense<7> : tensor<i32>
  %c8 = stablehlo.constant dense<8> : tensor<i32>
  %one = stablehlo.constant dense<1.0> : tensor<256x256xf32>
  %zeros = stablehlo.constant dense<0.0> : tensor<8x256x256xf32>
  %forward:6 = stablehlo.while(%i = %c0, %ws = %w, %h = %x, %kept = %zeros, %tanhs = %zeros, %sums = %zeros) : tensor<i32>, tensor<8x256x256xf32>, tensor<256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>
  cond {
    %more = stablehlo.compare LT, %i, %c8 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %ws, %i, %c0, %c0, sizes = [1, 256, 256] : (tensor<8x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x256x256xf32>
    %weights = stablehlo.reshape %row : (tensor<1x256x256xf32>) -> tensor<256x256xf32>
    %inner = stablehlo.dot_general %h, %weights, contracting_dims = [1] x [0] : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
    %next = stablehlo.tanh %inner : tensor<256x256xf32>
    %h_row = stablehlo.reshape %h : (tensor<256x256xf32>) -> tensor<1x256x256xf32>
    %kept_next = stablehlo.dynamic_update_slice %kept, %h_row, %i, %c0, %c0 : (tensor<8x256x256xf32>, tensor<1x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<8x256x256xf32>
    %tanh_row = stablehlo.reshape %next : (tensor<256x256xf32>) -> tensor<1x256x256xf32>
    %tanhs_next = stablehlo.dynamic_update_slice %tanhs, %tanh_row, %i, %c0, %c0 : (tensor<8x256x256xf32>, tensor<1x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<8x256x256xf32>
    %sum_row = stablehlo.reshape %inner : (tensor<256x256xf32>) -> tensor<1x256x256xf32>
    %sums_next = stablehlo.dynamic_update_slice %sums, %sum_row, %i, %c0, %c0 : (tensor<8x256x256xf32>, tensor<1x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<8x256x256xf32>
    %i_next = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %i_next, %ws, %next, %kept_next, %tanhs_next, %sums_next : tensor<i32>, tensor<8x256x256xf32>, tensor<256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>
  }
  %backward:7 = stablehlo.while(%j = %c0, %ws = %w, %d = %forward#2, %kept = %forward#3, %tanhs = %forward#4, %sums = %forward#5, %gradients = %zeros) : tensor<i32>, tensor<8x256x256xf32>, tensor<256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>
  cond {
    %more = stablehlo.compare LT, %j, %c8 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %i = stablehlo.subtract %c7, %j : tensor<i32>
    %row = stablehlo.dynamic_slice %ws, %i, %c0, %c0, sizes = [1, 256, 256] : (tensor<8x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x256x256xf32>
    %weights = stablehlo.reshape %row : (tensor<1x256x256xf32>) -> tensor<256x256xf32>
    %h_row = stablehlo.dynamic_slice %kept, %i, %c0, %c0, sizes = [1, 256, 256] : (tensor<8x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x256x256xf32>
    %h = stablehlo.reshape %h_row : (tensor<1x256x256xf32>) -> tensor<256x256xf32>
    %tanh_row = stablehlo.dynamic_slice %tanhs, %i, %c0, %c0, sizes = [1, 256, 256] : (tensor<8x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x256x256xf32>
    %tanh = stablehlo.reshape %tanh_row : (tensor<1x256x256xf32>) -> tensor<256x256xf32>
    %sum_row = stablehlo.dynamic_slice %sums, %i, %c0, %c0, sizes = [1, 256, 256] : (tensor<8x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x256x256xf32>
    %sum = stablehlo.reshape %sum_row : (tensor<1x256x256xf32>) -> tensor<256x256xf32>
    %square = stablehlo.multiply %tanh, %tanh : tensor<256x256xf32>
    %slope = stablehlo.subtract %one, %square : tensor<256x256xf32>
    %scaled = stablehlo.multiply %d, %slope : tensor<256x256xf32>
    %d_inner = stablehlo.add %scaled, %sum : tensor<256x256xf32>
    %gradient = stablehlo.dot_general %h, %d_inner, contracting_dims = [0] x [0] : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
    %d_next = stablehlo.dot_general %d_inner, %weights, contracting_dims = [1] x [1] : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
    %gradient_row = stablehlo.reshape %gradient : (tensor<256x256xf32>) -> tensor<1x256x256xf32>
    %gradients_next = stablehlo.dynamic_update_slice %gradients, %gradient_row, %i, %c0, %c0 : (tensor<8x256x256xf32>, tensor<1x256x256xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<8x256x256xf32>
    %j_next = stablehlo.add %j, %c1 : tensor<i32>
    stablehlo.return %j_next, %ws, %d_next, %kept, %tanhs, %sums, %gradients_next : tensor<i32>, tensor<8x256x256xf32>, tensor<256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>, tensor<8x256x256xf32>
  }
  return %backward#2, %backward#6 : tensor<256x256xf32>, tensor<8x256x256xf32>
}
